"""Moves stored jobs off a worker: publishes the next attempt, then deletes the old message, always in that order.

A late ack, in-progress or nak from the old worker then names a deleted sequence and has no effect.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping

import msgspec
import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode_request, encode, job_headers, log_ids, parse_job_headers
from headrace.broker.dead_letters import MOST_BYTES
from headrace.broker.errors import WireError
from headrace.broker.messages.control import HistoryEntry, Refuse
from headrace.broker.messages.durable import DeadLetter, Unreadable
from headrace.broker.messages.events import JobEvent, JobEvents
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Envelope
from headrace.broker.settings import Timing
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects, moved_class

log = structlog.get_logger()

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
