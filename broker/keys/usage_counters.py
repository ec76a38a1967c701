"""Adds to the counters of a deployment: exact sums over all frontends, kept by the server."""

from __future__ import annotations

import msgspec

from headrace.broker.jobs import new_id
from headrace.broker.messages.base import Record
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

INCREMENT = "Nats-Incr"
_TIMEOUT_S = 2.0


class OpenCounts(Record, frozen=True, kw_only=True):
    """Counts of the requests that a frontend is answering, by owner."""

    ingress: str
    open: dict[str, int]


class _Value(msgspec.Struct):
    val: str


_value = msgspec.json.Decoder(_Value)


class UsageCounters:
    """The counters of one deployment, by owner, kind and window."""

    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._stream = subjects.stream("QUOTA")

    async def add(self, owner: str, kind: str, window: int, amount: int) -> int | None:
        """Add to a counter and return the sum of all frontends; None if the server cannot count (before 2.12).

        An addition whose confirmation is lost is repeated under its id and counts once. Raises a JetStreamError.
        """
        subject = self._subjects.quota(owner, kind, window)
        ack = await self._messaging.publish(
            subject, b"", headers={INCREMENT: f"{amount:+d}"}, msg_id=new_id(), timeout_s=_TIMEOUT_S
        )
        if ack.total is not None or not ack.duplicate:
            return ack.total
        for message in await self._messaging.last_messages(self._stream, [subject]):
            return int(_value.decode(message.data).val)
        return None
