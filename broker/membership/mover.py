"""Moves stored jobs off a worker, and finds the workers that have died, in a periodic round over the work queue of a pool.

A move publishes the next attempt, then deletes the old message, always in that order: a late ack, in-progress or nak from the
old worker then names a deleted sequence and has no effect.

A worker that died without work leaves only its consumers.  Those of workers that the janitor has seen alive are deleted when
they die; those of workers that died before it began to act, together with the broker or a whole `headrace up`, it finds in the
list of consumers, which it reads once when it begins.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping

import msgspec
import structlog
import xxhash

from headrace.broker import metrics
from headrace.broker.codec import decode_request, encode, job_headers, log_ids, parse_job_headers
from headrace.broker.dead_letters import MOST_BYTES
from headrace.broker.errors import WireError
from headrace.broker.membership.members import Members
from headrace.broker.messages.control import HistoryEntry, Refuse
from headrace.broker.messages.durable import DeadLetter, Unreadable
from headrace.broker.messages.events import JobEvent, JobEvents
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Envelope
from headrace.broker.settings import Timing
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, SubjectError
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects, moved_class

log = structlog.get_logger()

MOST_STRANGE = 100  # subjects without a worker that are logged
AT_ONCE = 16  # concurrent moves of a worker's messages: each one waits for two answers of the server


def message_ttl_s(deadline: float, wall_s: float, slack_s: float) -> float:
    """Return the Nats-TTL of a job: garbage collection some seconds after its deadline, at least one second from now."""
    return max(1.0, math.ceil(deadline - wall_s) + slack_s)


class Mover:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        *,
        pool: str,
        timing: Timing,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._pool = pool
        self._timing = timing
        self._wall = wall

    async def move(
        self,
        *,
        worker: str,
        seq: int,
        data: bytes,
        headers: Mapping[str, str] | None,
        suspect: str | None,
        reason: str,
        group: int = 0,
    ) -> None:
        """Move a message of `worker`. `suspect` is the name to append to the history if the worker may have crashed.

        `group`: the number of jobs that it had then, this one included; 0 = not known.

        Returns only when the copy is stored and the old message is deleted; retries until then. A message that cannot be
        decoded is deleted.
        """
        try:
            envelope = decode_request(data)
            attempt, history = parse_job_headers(headers)
        except WireError as error:
            log.error("job.malformed", worker=worker, seq=seq, error=str(error))
            metrics.MALFORMED.labels("work").inc()
            self._bury_unreadable(worker, data, str(error))
            await self._delete(seq)
            return
        if suspect is not None:
            history = [*history, HistoryEntry(attempt, suspect, group)]
        try:
            await self._publish(envelope, data, attempt + 1, history, seq)
        except PayloadTooLarge as error:  # its headers have grown beyond what the server takes
            self._bury(envelope, attempt, history, f"the request cannot be moved: {error}")
            await self._delete(seq)
            return
        await self._delete(seq)
        metrics.MOVED.labels(reason).inc()
        log.info("job.moved", **log_ids(envelope), attempt=attempt + 1, worker=worker, reason=reason)
        event = JobEvent("moved", envelope.id, attempt, worker, envelope.tokens)
        self._messaging.send(self._subjects.events(self._pool), encode(JobEvents(events=[event])))

    async def store_again(self, seq: int, data: bytes, headers: Mapping[str, str] | None) -> None:
        """Store the next attempt of a message that the stream has lost, once it had the sequence `seq`. Retries until it is.

        Raises WireError for a message that cannot be decoded.
        """
        envelope = decode_request(data)
        attempt, history = parse_job_headers(headers)
        await self._publish(envelope, data, attempt + 1, history, seq)
        metrics.MOVED.labels("displaced").inc()
        log.info("job.stored_again", **log_ids(envelope), attempt=attempt + 1)

    async def _publish(
        self, envelope: Envelope, data: bytes, attempt: int, history: list[HistoryEntry], source_seq: int
    ) -> None:
        subject = self._subjects.req(self._pool, moved_class(envelope.request_class), envelope.tenant)
        headers = job_headers(attempt, history)
        while True:
            try:
                await self._messaging.publish(
                    subject,
                    data,
                    headers=headers,
                    msg_id=f"{envelope.id}.{attempt}@{source_seq}",
                    ttl_s=message_ttl_s(envelope.deadline, self._wall(), self._timing.ttl_slack_s),
                    timeout_s=self._timing.publish_timeout_s,
                )
            except PayloadTooLarge:
                raise
            except JetStreamError as error:  # an unknown outcome is retried under the same id until it is certain
                log.warning("move.retry", **log_ids(envelope), attempt=attempt, error=str(error))
                await asyncio.sleep(self._timing.retry_s)
            else:
                return

    def _bury(self, envelope: Envelope, attempt: int, history: list[HistoryEntry], why: str) -> None:
        """End a request that can never be moved, and tell its judge."""
        metrics.FAILED_MESSAGES.labels("move").inc()
        log.error("job.not_movable", **log_ids(envelope), attempt=attempt, error=why)
        refusal = Refuse(id=envelope.id, attempt=attempt + 1, fault=JobFault("engine_error", why))
        self._messaging.send(self._subjects.judge(envelope.judge), encode(refusal))
        bare = msgspec.structs.replace(envelope, payload=b"", hashes=b"")  # its message has no room for the rest of a letter
        letter = DeadLetter(envelope=bare, reason=why, attempt=attempt, history=history, at=self._wall())
        self._messaging.send(self._subjects.dlq(self._pool), encode(letter))

    def _bury_unreadable(self, worker: str, data: bytes, why: str) -> None:
        subject = self._subjects.work(self._pool, worker)
        letter = Unreadable(subject=subject, why=why, data=data[:MOST_BYTES], at=self._wall())
        self._messaging.send(self._subjects.dlq(self._pool), encode(letter))

    async def _delete(self, seq: int) -> None:
        stream = self._subjects.stream("WORK")
        while True:
            try:
                await self._messaging.delete_message(stream, seq)
            except JetStreamError as error:
                log.warning("move.delete_retry", seq=seq, error=str(error))
                await asyncio.sleep(self._timing.retry_s)
            else:
                return

    async def move_all(self, worker: str, *, died: bool, reason: str, keep: Collection[int] = ()) -> int:
        """Move all messages stored for `worker`, except the sequences in `keep`. Returns the number of moved messages.

        If the worker `died`, only the messages that are there now: those placed on it meanwhile show that it is back.
        """
        moved = 0
        while messages := [m for m in await self._stored_for(worker) if m.seq not in keep]:
            for first in range(0, len(messages), AT_ONCE):
                batch = messages[first : first + AT_ONCE]
                await asyncio.gather(*(self._move(m, worker, len(messages) if died else 0, reason) for m in batch))
            moved += len(messages)
            if died:
                break
        return moved

    async def _move(self, message: StoredMessage, worker: str, group: int, reason: str) -> None:
        """Move a stored message of a worker that died with a group of jobs, or, with `group` 0, did not die."""
        await self.move(
            worker=worker,
            seq=message.seq,
            data=message.data,
            headers=message.headers,
            suspect=worker if group else None,
            reason=reason,
            group=group,
        )

    async def _stored_for(self, worker: str) -> list[StoredMessage]:
        stream = self._subjects.stream("WORK")
        while True:
            try:
                return await self._messaging.subject_messages(stream, self._subjects.work(self._pool, worker))
            except JetStreamError as error:
                log.warning("move.retry", worker=worker, error=str(error))
                await asyncio.sleep(self._timing.retry_s)


def rendezvous_first(pool: str, candidates: list[str]) -> str | None:
    """Return the candidate with the highest hash, so that all processes agree on one without communication."""
    return max(candidates, key=lambda name: (xxhash.xxh3_64_intdigest(f"{pool}/{name}".encode()), name), default=None)


class Janitor:
    """Moves the jobs of dead workers once a second. It runs in every worker and router; `acts` decides when it may act."""

    def __init__(
        self, messaging: Messaging, subjects: Subjects, members: Members, mover: Mover, *, pool: str, timing: Timing
    ) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._members = members
        self._mover = mover
        self._pool = pool
        self._timing = timing
        self._wake = asyncio.Event()
        self._seen: set[str] = set()  # workers that were live in the last round, or have a consumer
        self._listed = False  # the consumers have been read since it began to act
        self._strange: set[str] = set()  # subjects that were logged

    def wake(self) -> None:
        """Start the next round now, because a lease has vanished."""
        self._wake.set()

    async def run(self, acts: Callable[[], bool]) -> None:
        """Do a round each `janitor_s`, and at `wake`, until cancelled. Rounds in which `acts()` is False move no work."""
        while True:
            try:
                async with asyncio.timeout(self._timing.janitor_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if not acts():
                self._seen = set(self._members.workers(self._pool))
                self._listed = False
                continue
            try:
                await self._round()
            except JetStreamError as error:
                log.warning("janitor.failed", pool=self._pool, error=str(error))

    async def _round(self) -> None:
        stream = self._subjects.stream("WORK")
        counts = await self._messaging.subject_counts(stream, self._subjects.work_filter(self._pool))
        placed = {worker for subject in counts if (worker := self._worker_of(subject)) is not None}
        if not self._listed:
            self._seen |= await self._with_consumer()
            self._listed = True
        live = set(self._members.workers(self._pool))
        # A worker that died without work has left no message, only its consumers.
        for worker in sorted(placed | (self._seen - live)):
            if self._members.worker_live(self._pool, worker) or not await self._members.worker_gone(self._pool, worker):
                continue
            moved = await self._mover.move_all(worker, died=True, reason="worker_gone")
            names = self._subjects
            for kind, own, reads in (
                ("WORK", names.work_consumer(worker), names.work(self._pool, worker)),
                ("PREFILL", names.prefill_consumer(self._pool, worker), names.prefill(self._pool, worker)),
            ):
                for consumer in {own, *await self._readers(kind, reads)}:
                    await self._messaging.delete_consumer(names.stream(kind), consumer)
            self._seen.discard(worker)
            if moved:
                log.warning("worker.work_moved", worker=worker, pool=self._pool, moved=moved)
        self._seen |= live

    async def _readers(self, kind: str, subject: str) -> set[str]:
        """Return the names of the consumers that read this subject, which may have a part that only the worker knew."""
        listed = await self._messaging.consumer_subjects(self._subjects.stream(kind))
        return {name for name, subjects in listed.items() if subject in subjects}

    async def _with_consumer(self) -> set[str]:
        """Return the workers of the pool that have a consumer of WORK, dead or alive. Raises JetStreamError."""
        consumers = await self._messaging.consumer_subjects(self._subjects.stream("WORK"))
        own = self._subjects.work_filter(self._pool).removesuffix("*")
        found = {self._worker_of(name) for names in consumers.values() for name in names if name.startswith(own)}
        return {worker for worker in found if worker is not None}

    def _worker_of(self, subject: str) -> str | None:
        """Return the worker that owns a subject of WORK. None if that can be no worker: nothing is read there, or ever will be.

        Such a message expires with its Nats-TTL, or with the stream's own limit. It must not keep the round from the others.
        """
        try:
            return self._subjects.parse_work(subject).worker
        except SubjectError as error:
            if subject not in self._strange and len(self._strange) < MOST_STRANGE:
                self._strange.add(subject)
                metrics.MALFORMED.labels("subject").inc()
                log.error("work.unknown_subject", pool=self._pool, error=str(error)[:300])
            return None
