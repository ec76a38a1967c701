"""A stored message that nobody can read becomes a dead letter, bytes and all, instead of coming again for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.broker.codec import encode
from headrace.broker.messages import Unreadable
from headrace.jetstream.ports import Delivery, Messaging
from headrace.jetstream.subjects import Subjects

MOST_BYTES = 64 * 1024  # of the message that are kept


def dead_letter(
    messaging: Messaging, subjects: Subjects, pool: str, delivery: Delivery, why: str, *, wall: Callable[[], float] = time.time
) -> None:
    """Store what it was and why it cannot be read, then ack it. Both go over one connection, in this order."""
    letter = Unreadable(subject=delivery.subject, why=why, data=bytes(delivery.data[:MOST_BYTES]), at=wall())
    messaging.send(subjects.dlq(pool), encode(letter))
    delivery.ack()
