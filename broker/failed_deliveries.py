"""Ends stored messages whose handling fails: a dead letter, a refusal to the judge, an ack, and the process goes on.

What a message may hold is checked where it is decoded.  This is for what no check has foreseen: one message must never end the
process that reads it, nor come again for ever, nor take the place of those behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode_request, encode, parse_job_headers
from headrace.broker.dead_letters import dead_letter
from headrace.broker.errors import WireError
from headrace.broker.messages import DeadLetter, JobFault, Refuse
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Delivery, Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()


def fault_of_failure(error: Exception) -> JobFault:
    """Return the fault that a client is told for an unforeseen error, without its text, which may hold anything."""
    return JobFault("engine_error", f"the request failed inside Headrace ({type(error).__name__})")


def note_failure(kind: str, error: Exception, **fields: object) -> None:
    """Count and log a message of this kind whose handling failed, with the place where it did."""
    metrics.FAILED_MESSAGES.labels(kind).inc()
    log.error("message.failed", kind=kind, error=f"{type(error).__name__}: {error}"[:500], exc_info=error, **fields)


class FailedDeliveries:
    """Buries the deliveries of one consumer whose handling fails."""

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
