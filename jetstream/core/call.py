"""Keeps what is known of one call that waits for its answer, and decides when it is to be sent again."""

from __future__ import annotations

import asyncio

import msgspec

from headrace.jetstream.core.ack_group import AckPart
from headrace.jetstream.errors import JetStreamError, RequestTimeout

AGAIN_S = 0.4  # without an answer; a server that is well answers within some hundredths of a second


class ServerReply(msgspec.Struct, frozen=True):
    """An answer: payload, inline status (0 = none) and the raw header block."""

    data: bytes
    status: int = 0
    headers: bytes | None = None


class Call:
    """A call that waits for an answer. `future` is replaced for every try of a publish."""

    __slots__ = (
        "_again_at",
        "asked_at",
        "cmd",
        "deadline",
        "future",
        "repeatable",
        "repeated",
        "sent_again",
        "subject",
        "timed_out",
        "timer",
    )

    def __init__(self, subject: str, cmd: bytes, *, repeatable: bool | None) -> None:
        self.subject = subject
        self.cmd = cmd
        self.repeatable = repeatable  # None: a request, which is given up when the connection breaks
        self.repeated = bool(repeatable)  # may be sent more than once on one connection
        self.sent_again = False
        self.future: asyncio.Future[ServerReply] | AckPart[ServerReply] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.deadline = self.asked_at = 0.0  # loop time; not noted of a request that is answered by a client
        self.timed_out = False
        self._again_at = 0.0

    def is_due_again(self, now: float) -> bool:
        """Return True if it has had no answer for so long that it is to be sent again, at each such time once.

        The first look at a call only begins the time, so that a call without looks costs nothing.
        """
        if not self.repeated or self.future is None or self.future.done() or now < self._again_at:
            return False
        due = self._again_at > 0.0
        self._again_at = now + AGAIN_S
        return due

    def fail(self, error: JetStreamError) -> None:
        """End the wait for an answer by an error."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        """End the wait for an answer, because its time is over."""
        self.timed_out = True
        self.fail(RequestTimeout(f"no answer on {self.subject} in time"))
