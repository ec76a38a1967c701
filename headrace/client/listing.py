"""Lists the jobs of a tenant: those in the queue, and the latest results."""

from __future__ import annotations

from collections import deque

import msgspec

from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.messages import JobResult, JobStatus
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects

MOST_WAITING = 1_000_000  # jobs of a tenant that are looked through for one
SCANNED = 10_000  # of the latest results of all tenants, how many are looked through


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
    """Return a job of the tenant that has not ended, None if the queue has none of this id. Reads the tenant's whole queue."""
    pattern = f"{subjects.prefix}.job.*.{tenant}"
    waiting = await messaging.subject_messages(subjects.stream("JOB"), pattern, limit=MOST_WAITING)
    return next((found for message in waiting if (found := _waiting(message, tenant)).id == job), None)


async def _latest(messaging: Messaging, subjects: Subjects, tenant: str, limit: int) -> list[StoredMessage]:
    stream = subjects.stream("RESULT")
    state = await messaging.stream_state(stream)
    if not state.messages:
        return []
    found: deque[StoredMessage] = deque(maxlen=limit)
    start = max(state.first_seq, state.last_seq - SCANNED + 1)
    follow = messaging.follow(stream, f"{subjects.prefix}.result.*.*", start_seq=start)
    try:
        while follow.position < state.last_seq:
            batch = await follow.next()
            found.extend(m for m in batch.messages if m.subject.split(".")[-2] == tenant)
            if not batch.pending:
                break
    finally:
        await follow.close()
    return list(found)


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
