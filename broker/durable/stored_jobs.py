"""Stores jobs of clients, cancels them, and reads their events and results, without being their carrier."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.durable.errors import EventUnknown, JobNameReused, StreamIncomplete
from headrace.broker.durable.names import JobRef, job_token
from headrace.broker.durable.quota import QueueQuotas
from headrace.broker.durable.results import TEXTS, OutsideEnds, ResultStore, decode_result, without_answer
from headrace.broker.durable.stored_job import JobPublisher, NewJob
from headrace.broker.errors import BrokerUnavailable, WireError
from headrace.broker.messages.durable import JobResult, JobStatus, ResultResponse, StreamEntry
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.frames import JobFault
from headrace.jetstream.errors import JetStreamError, RevisionConflict, StreamTrimmed
from headrace.jetstream.ports import Follow, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import DAY_S

# Reads the events of a job's durable stream from any number on: replays those that are stored, then follows.
#
# Readers need no carrier: they see what was appended by any writer. Event numbers count inside the job; an entry may hold
# several events, and a reader may begin in the middle of one.


class Stretch(NamedTuple):
    """Events of one entry. `first` is the number of the first of them; `end` is the entry that ends the stream."""

    first: int
    events: list[bytes]
    end: StreamEntry | None = None


class EventJoin:
    """Joins the events of entries, from event `wanted` on. Pure."""

    def __init__(self, wanted: int = 0) -> None:
        self._first = wanted
        self.wanted = wanted  # the next event to hand out
        self._known = 0  # events in the entries so far
        self._written: dict[str, int] = {}  # entries of each delivery
        self._seq = 0

    def take(self, seq: int, entry: StreamEntry) -> Stretch | None:
        """Take the next entry; one that was taken before is passed over. Returns what is new in it.

        Raises StreamIncomplete if entries or events before it are missing, EventUnknown if the stream ends before event
        `wanted - 1`.
        """
        if seq <= self._seq:
            return None
        before = self._written.get(entry.nonce, 0)
        if entry.n != before + 1:
            raise StreamIncomplete(f"the stream has entry {entry.n} of delivery {entry.nonce!r} behind its entry {before}")
        if entry.events and entry.first_event != self._known:
            raise StreamIncomplete(f"the stream continues with event {entry.first_event}, after {self._known} events")
        self._seq = seq
        self._written[entry.nonce] = entry.n
        first = max(self._known, self.wanted)
        fresh = entry.events[first - self._known :]
        self._known += len(entry.events)
        self.wanted = max(self.wanted, self._known)
        end = entry if entry.kind == "end" else None
        if end is not None and self._first > self._known:
            raise EventUnknown(f"there is no event {self._first - 1}: the stream has ended with {self._known} events")
        return Stretch(first, fresh, end) if fresh or end is not None else None


class EventFollow:
    """Reads the events of one job, for one reader. Close it."""

    def __init__(self, messaging: Messaging, stream: str, subject: str, *, first: int) -> None:
        self._messaging = messaging
        self._stream = stream
        self._subject = subject
        self._join = EventJoin(first)
        self._read: deque[Stretch] = deque()
        self._follow: Follow | None = None

    async def next(self) -> Stretch:
        """Wait for more events, or the end. May be cancelled and called again.

        Raises StreamIncomplete, EventUnknown, JetStreamError.
        """
        while not self._read:
            if self._follow is None:
                self._follow = await follow_all(self._messaging, self._stream, self._subject)
            try:
                batch = await self._follow.next()
            except StreamTrimmed:  # entries of other jobs have expired; if some of this one have, the next ones do not join
                await self.close()
                continue
            for message in batch.messages:
                try:
                    entry = decode(StreamEntry, message.data)
                except WireError as error:
                    raise StreamIncomplete(f"entry {message.seq} of {self._subject} cannot be read: {error}") from None
                stretch = self._join.take(message.seq, entry)
                if stretch is not None:
                    self._read.append(stretch)
        return self._read.popleft()

    async def close(self) -> None:
        follow, self._follow = self._follow, None
        if follow is not None:
            await follow.close()


async def follow_all(messaging: Messaging, stream: str, subject: str) -> Follow:
    """Follow a subject from the first message that is stored. Raises JetStreamError."""
    state = await messaging.stream_state(stream)
    return messaging.follow(stream, subject, start_seq=state.first_seq)


class JobReader:
    """Reads durable streams and results of jobs for those who wait for them. It sets no deadline: its callers do."""

    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._messaging = messaging
        self._subjects = subjects

    def events(self, tenant: str, token: str, *, first: int = 0) -> EventFollow:
        stream, subject = self._subjects.stream("RSP"), self._subjects.rsp(tenant, token)
        return EventFollow(self._messaging, stream, subject, first=first)

    async def result(self, tenant: str, token: str) -> JobResult:
        """Wait for the result of a job. Raises JetStreamError."""
        stream, subject = self._subjects.stream("RESULT"), self._subjects.result(tenant, token)
        while True:
            follow = await follow_all(self._messaging, stream, subject)
            try:
                while True:
                    for message in (await follow.next()).messages:
                        return decode_result(message.data)
            except StreamTrimmed:  # results of other jobs have expired
                continue
            finally:
                await follow.close()

    async def begun(self, tenant: str, token: str) -> bool:
        """Return whether entries of a job are seen. Raises JetStreamError."""
        return bool(await self._messaging.last_messages(self._subjects.stream("RSP"), [self._subjects.rsp(tenant, token)]))


# Cancels stored jobs: tells their carriers, then writes the end itself unless there is one.
#
# A canceller need not know whether a job is plain or durable: it writes the end of the stream first, and then the result. Of
# a plain job only the result decides, and a carrier that meets the entry makes the same result.

log = structlog.get_logger()

CARRIER_FIRST_S = 0.3  # time in which the carrier of a job ends it itself, a durable stream with the rows that it has


class JobCanceller:
    def __init__(self, messaging: Messaging, subjects: Subjects, *, wall: Callable[[], float]) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._ends = OutsideEnds(messaging, subjects, ResultStore(messaging, subjects), wall=wall)
        self._wall = wall

    async def cancel(self, tenant: str, name: str) -> JobStatus:
        """Cancel a job, and return the status that stands, which is another one if the job had ended before.

        It tries until it is cancelled. Raises StreamIncomplete for a stream that has lost entries.
        """
        job = JobRef(tenant=tenant, name=name)
        self._messaging.send(self._subjects.cancel_jobs(), encode(Cancel(ids=[job.id])))
        await asyncio.sleep(CARRIER_FIRST_S)
        result = without_answer(job, "cancelled", self._wall())
        status = await self._ends.end_either(job, result, JobFault("cancelled", TEXTS["cancelled"]))
        log.info("job.cancelled", stored_job=job.id, tenant=job.tenant, status=status)
        return status


# Keeps the digest of the request for which a client has chosen a job's name, from before the job is stored until its result
# has expired. Jobs of older versions have none.

DIGEST_TTL_S = 24 * DAY_S  # as a job and its result together


def digest_key(tenant: str, token: str) -> str:
    return f"body.{tenant}.{token}"


class RequestDigests:
    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._bucket = messaging.bucket(subjects.bucket("state"))

    async def claim(self, tenant: str, token: str, digest: str) -> None:
        """Store the digest of a new job, once. Raises JobNameReused if there is another one, BrokerUnavailable."""
        try:
            await self._bucket.create(digest_key(tenant, token), digest.encode(), ttl_s=DIGEST_TTL_S)
        except RevisionConflict:
            await self.check(tenant, token, digest)
        except JetStreamError as error:
            raise BrokerUnavailable(f"the broker cannot take the job: {error}") from error

    async def check(self, tenant: str, token: str, digest: str) -> None:
        """Raise JobNameReused if the job is known to be that of another request, BrokerUnavailable."""
        try:
            entry = await self._bucket.get(digest_key(tenant, token))
        except JetStreamError as error:
            raise BrokerUnavailable(f"the broker cannot say what job {token!r} is: {error}") from error
        if entry is not None and entry.value != digest.encode():
            raise JobNameReused(token)


class StoredJobs:
    """The jobs of all tenants. A job is named by its tenant and its token."""

    def __init__(self, messaging: Messaging, subjects: Subjects, quotas: QueueQuotas | None = None) -> None:
        """`quotas` None = only the stream's own caps hold."""
        self._quotas = quotas
        self._publisher = JobPublisher(messaging, subjects)
        self._reader = JobReader(messaging, subjects)
        self._results = ResultStore(messaging, subjects)
        self._canceller = JobCanceller(messaging, subjects, wall=time.time)
        self._digests = RequestDigests(messaging, subjects)

    async def publish(self, job: NewJob) -> None:
        """Store a job. Raises Overloaded, RequestTooLarge, BrokerUnavailable, after which it may be stored all the same.

        Raises JobNameReused for a name whose request was another one.
        """
        if self._quotas is not None:
            await self._quotas.check(job.tenant, len(job.body))
        if job.digest:
            await self._digests.claim(job.tenant, job_token(job.name), job.digest)
        await self._publisher.publish(job)

    async def check_request(self, tenant: str, token: str, digest: str) -> None:
        """Raise JobNameReused if the stored job is known to be that of another request, BrokerUnavailable."""
        await self._digests.check(tenant, token, digest)

    def events(self, tenant: str, token: str, *, first: int = 0) -> EventFollow:
        """Return a reader of a job's events from number `first` on."""
        return self._reader.events(tenant, token, first=first)

    async def begun(self, tenant: str, token: str) -> bool:
        return await self._reader.begun(tenant, token)

    async def known(self, tenant: str, token: str) -> JobResult | None:
        return await self._results.get(tenant, token)

    async def result(self, tenant: str, token: str) -> JobResult:
        return await self._reader.result(tenant, token)

    async def response(self, result: JobResult) -> ResultResponse | None:
        return await self._results.response(result)

    async def drop(self, result: JobResult) -> None:
        """Delete the object of a result that has one; the result itself stays. Raises JetStreamError."""
        await self._results.drop(result)

    async def cancel(self, tenant: str, token: str) -> None:
        """Cancel a job that a frontend named, and return once it has an end. It tries until it is cancelled."""
        await self._canceller.cancel(tenant, token)
