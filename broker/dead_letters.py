"""Stores dead letters: jobs that crashed too many workers, and stored messages that cannot be decoded."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.broker.codec import encode
from headrace.broker.messages import DeadLetter, Unreadable
from headrace.broker.retry import until_done
from headrace.jetstream.ports import Delivery, Messaging
from headrace.jetstream.subjects import Subjects

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
