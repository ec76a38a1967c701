"""Watches a bucket by a pull consumer, for logins whose consumers a steward makes.

A push consumer is told by its maker where to deliver, so such a login cannot be given one.  Here the login asks for changes at
its own inbox, a number of them at a time, and asks again before they have all arrived.  In all else the watch is the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.jetstream.core import wire
from headrace.jetstream.watch import HEARTBEAT_S, BucketWatch

BATCH = 1024
EXPIRES_S = 10.0
_EXPIRED = "408"


class PulledWatch(BucketWatch):
    """A watch of a bucket; implements `ports.Watch`."""

    _inbox = ""
    _outstanding = 0

    def _delivery(self, inbox: str) -> dict[str, Any]:
        return {}

    def _started(self, inbox: str) -> None:
        self._inbox = inbox
        self._outstanding = 0
        self._ask()

    def _ask(self) -> None:
        wanted = BATCH - self._outstanding
        request = {
            "batch": wanted,
            "expires": wire.nanoseconds(EXPIRES_S),
            "idle_heartbeat": wire.nanoseconds(HEARTBEAT_S),
        }
        subject = self._session.api.subject(f"CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}")
        if self._core.send_now(wire.pub(subject, msgspec.json.encode(request), self._inbox)):
            self._outstanding += wanted

    def _on_revision(self, key: str, data: bytes, revision: int, fields: dict[str, str]) -> None:
        super()._on_revision(key, data, revision, fields)
        self._outstanding -= 1
        if self._outstanding < BATCH // 2:
            self._ask()

    def _on_status(self, status: str, fields: dict[str, str], reply: bytes) -> None:
        left = fields.get(wire.PENDING_MESSAGES, "")
        if status != _EXPIRED or not left.isdigit():
            super()._on_status(status, fields, reply)
            return
        self._backoff_s = 0.0
        self._outstanding = max(0, self._outstanding - int(left))
        if not self._broken and self._outstanding < BATCH // 2:
            self._ask()
