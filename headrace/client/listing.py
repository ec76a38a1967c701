"""Lists the jobs of a tenant: those in the queue, and the latest results."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator

import msgspec

from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.messages import JobResult, JobStatus
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects

PAGE = 256  # messages that are read at once
LATEST = 10_000  # of the results of all tenants, how many are looked through first


class ListedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a list. `status` None: it waits or runs. Times are Unix time, 0 where they are not known."""

    id: str
    status: JobStatus | None = None
    endpoint: str = ""
    request_class: str = ""
    batch: str = ""
    durable: bool = False
    stored: float = 0.0
    deadline: float = 0.0
    finished: float = 0.0


async def list_jobs(messaging: Messaging, subjects: Subjects, tenant: str, *, limit: int) -> list[ListedJob]:
    """List jobs that have not ended, oldest first, then the latest results; at most `limit` of each."""
    pattern = f"{subjects.prefix}.job.*.{tenant}"
    waiting = await messaging.subject_messages(subjects.stream("JOB"), pattern, limit=limit)
    ended = [job for message in await _latest(messaging, subjects, tenant, limit) if (job := _ended(message))]
    over = {job.id for job in ended}
    return [*(job for message in waiting if (job := _waiting(message, tenant)).id not in over), *ended]


async def find_open(messaging: Messaging, subjects: Subjects, tenant: str, job: str) -> ListedJob | None:
    """Return a job of the tenant that has not ended, None if there is none of this id. Reads the tenant's queue up to it."""
    stream = subjects.stream("JOB")
    state = await messaging.stream_state(stream)
    pattern = f"{subjects.prefix}.job.*.{tenant}"
    async for message in _between(messaging, stream, pattern, state.first_seq, state.last_seq + 1):
        if (found := _waiting(message, tenant)).id == job:
            return found
    return None


async def _latest(messaging: Messaging, subjects: Subjects, tenant: str, limit: int) -> list[StoredMessage]:
    """Return the latest results of a tenant, oldest first.

    Results of other tenants lie between them, so the stream is looked through from its end in parts, each longer than the last.
    """
    stream = subjects.stream("RESULT")
    state = await messaging.stream_state(stream)
    pattern = f"{subjects.prefix}.result.{tenant}.*"
    found: list[StoredMessage] = []
    end, length = state.last_seq + 1, LATEST
    while end > state.first_seq and len(found) < limit:
        start = max(state.first_seq, end - length)
        part: deque[StoredMessage] = deque(maxlen=limit - len(found))
        async for message in _between(messaging, stream, pattern, start, end):
            part.append(message)
        found = [*part, *found]
        end, length = start, 4 * length
    return found


async def _between(messaging: Messaging, stream: str, pattern: str, start: int, end: int) -> AsyncIterator[StoredMessage]:
    """Yield the messages of a pattern from one sequence on up to another, which is not included; a page is held at a time."""
    while start < end:
        page = await messaging.subject_messages(stream, pattern, limit=PAGE, start_seq=start)
        for message in page:
            if message.seq >= end:
                return
            yield message
        if len(page) < PAGE:
            return
        start = page[-1].seq + 1


def _waiting(message: StoredMessage, tenant: str) -> ListedJob:
    try:
        job = parse_job(message.data, message.headers or {}, tenant=tenant, seq=message.seq, stored=message.at)
    except JobMalformed:
        return ListedJob(id=f"seq-{message.seq}", stored=message.at)
    return ListedJob(
        id=job.name,
        endpoint=job.endpoint,
        request_class=job.request_class,
        batch=job.batch,
        durable=job.durable,
        stored=job.created,
        deadline=job.deadline,
    )


def _ended(message: StoredMessage) -> ListedJob | None:
    try:
        result = msgspec.json.decode(message.data, type=JobResult)
    except msgspec.DecodeError:
        return None
    return ListedJob(id=result.id, status=result.status, stored=0.0, finished=result.finished)
