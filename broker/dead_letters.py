"""Dead letters: jobs that crashed too many workers, and stored messages that cannot be decoded or handled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode_request, encode, parse_job_headers
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Refuse
from headrace.broker.messages.durable import DeadLetter, Unreadable
from headrace.broker.messages.frames import JobFault
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Delivery, Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()


async def until_done(
    attempt: Callable[[], Awaitable[object]],
    *,
    event: str,
    retry_s: float,
    wanted: Callable[[], bool] = lambda: True,
    **context: str,
) -> None:
    """Call `attempt` until it succeeds or `wanted()` is False. Each failure is logged as `event`, with `context`.

    Raises every exception of `attempt` except JetStreamError, which is retried after `retry_s`.
    """
    while wanted():
        try:
            await attempt()
        except JetStreamError as error:
            log.warning(event, **context, error=str(error))
            await asyncio.sleep(retry_s)
        else:
            return


MOST_BYTES = 64 * 1024  # of an undecodable message that are kept


def dead_letter(
    messaging: Messaging, subjects: Subjects, pool: str, delivery: Delivery, why: str, *, wall: Callable[[], float] = time.time
) -> None:
    """Store an undecodable message with the reason `why`, then ack it, so that it is not redelivered forever.

    Both go over one connection, in this order. `wall` gives Unix time.
    """
    letter = Unreadable(subject=delivery.subject, why=why, data=bytes(delivery.data[:MOST_BYTES]), at=wall())
    messaging.send(subjects.dlq(pool), encode(letter))
    delivery.ack()


async def store_dead_letter(messaging: Messaging, subjects: Subjects, letter: DeadLetter, *, retry_s: float) -> None:
    """Store the dead letter of a job, once per request, and retry until it is stored."""
    request_id = letter.envelope.id
    data = encode(letter)

    async def publish() -> None:
        await messaging.publish(subjects.dlq(letter.envelope.pool), data, msg_id=f"{request_id}.dlq")

    await until_done(publish, event="deadletter.retry", retry_s=retry_s, request_id=request_id)


# Ends stored messages whose handling fails: a dead letter, a refusal to the judge, an ack, and the process goes on.
#
# What a message may hold is checked where it is decoded. This is for what no check has foreseen: one message must never end
# the process that reads it, nor come again for ever, nor take the place of those behind it.


def fault_of_failure(error: Exception) -> JobFault:
    """Return the client's fault for an unforeseen error, without its text, which may contain anything."""
    return JobFault("engine_error", f"the request failed inside Headrace ({type(error).__name__})")


def note_failure(kind: str, error: Exception, **fields: object) -> None:
    """Count and log a message of this kind whose handling failed, with the place where it did."""
    metrics.FAILED_MESSAGES.labels(kind).inc()
    log.error("message.failed", kind=kind, error=f"{type(error).__name__}: {error}"[:500], exc_info=error, **fields)


class FailedDeliveries:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        *,
        pool: str,
        kind: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`kind` names the consumer in metrics and logs."""
        self._messaging = messaging
        self._subjects = subjects
        self._pool = pool
        self._kind = kind
        self._wall = wall

    def guard(self, handler: Callable[[Delivery], None], *, after: Callable[[], None]) -> Callable[[Delivery], None]:
        """Return `handler`, which buries what it fails with, and then calls `after`, to ask for more."""

        def guarded(delivery: Delivery) -> None:
            try:
                handler(delivery)
            except Exception as error:
                self.bury(delivery, error)
                after()

        return guarded

    def bury(self, delivery: Delivery, error: Exception) -> None:
        """Store a dead letter, tell the judge of a request that it has ended, and ack."""
        note_failure(self._kind, error, seq=delivery.stream_seq)
        why = f"failed: {type(error).__name__}: {error}"[:500]
        try:
            envelope = decode_request(delivery.data)
            attempt, history = parse_job_headers(delivery.headers)
            letter = DeadLetter(envelope=envelope, reason=why, attempt=attempt, history=history, at=self._wall())
            refusal = Refuse(id=envelope.id, attempt=attempt, fault=fault_of_failure(error))
            self._messaging.send(self._subjects.judge(envelope.judge), encode(refusal))
            self._messaging.send(self._subjects.dlq(self._pool), encode(letter))
            delivery.ack()
        except (WireError, JetStreamError, UnicodeError):  # no request, or one that leaves no room for the rest of a letter
            dead_letter(self._messaging, self._subjects, self._pool, delivery, why, wall=self._wall)
