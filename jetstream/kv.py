"""Reads and writes key-value buckets; implements `ports.Bucket`.

The code uses the bucket's stream, not nats-py's `KeyValue`, which returns a live entry for a key whose lease has expired and
refuses to create it again, because it does not know limit markers.  Here a key whose last message is a marker of any kind is
absent, and compare-and-set refers to the marker's sequence.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from datetime import datetime

from headrace.jetstream.core import wire
from headrace.jetstream.core.server_session import ServerSession
from headrace.jetstream.errors import RevisionConflict, SubjectError, TopologyError
from headrace.jetstream.ports import Change, Entry, KeyState, StoredMessage
from headrace.jetstream.pulled_watch import PulledWatch
from headrace.jetstream.watch import BucketWatch

DELETE_MARKER_TTL_S = 30.0
WRITE_TIMEOUT_S = 2.0

_KEY = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*\Z")
_PATTERN = re.compile(r"(([A-Za-z0-9_=/-]+|\*)\.)*([A-Za-z0-9_=/-]+|\*|>)\Z")


class KvBucket:
    """A key-value bucket. Every write carries an id, so that a repeat after a broken connection cannot conflict with itself."""

    def __init__(self, session: ServerSession, name: str) -> None:
        self.name = name
        self._session = session
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."

    async def get(self, key: str) -> Entry | None:
        stored = await self._last(key)
        return None if stored is None or is_marker(stored) else Entry(key, stored.data, stored.seq)

    async def state(self, key: str) -> KeyState:
        stored = await self._last(key)
        if stored is None:
            return "unknown"
        if not is_marker(stored):
            return "present"
        return "expired" if (stored.headers or {}).get(wire.MARKER_REASON) == "MaxAge" else "deleted"

    async def age_s(self) -> float:
        info = await self._session.api.call(f"STREAM.INFO.{self._stream}")
        age = datetime.fromisoformat(info["ts"]) - datetime.fromisoformat(info["created"])
        return abs(age.total_seconds())  # negative after the clock was set back: then it was not made just now

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return await self._write(key, value, ttl_s=ttl_s)

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, unmarked: bool = False) -> int:
        try:
            return await self._write(key, value, revision=0, ttl_s=ttl_s)
        except RevisionConflict:
            if unmarked:
                raise
            stored = await self._last(key)
        if stored is not None and not is_marker(stored):
            raise RevisionConflict(f"key {key!r} of bucket {self.name} exists already, revision {stored.seq}")
        return await self._write(key, value, revision=stored.seq if stored else 0, ttl_s=ttl_s)

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        return await self._write(key, value, revision=revision, ttl_s=ttl_s)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        await self._write(key, b"", revision=revision, ttl_s=DELETE_MARKER_TTL_S, headers={wire.KV_OPERATION: "DEL"})

    async def entries(self, pattern: str = ">") -> list[Entry]:
        cut = len(self._prefix)
        stored = await self._session.reader.last_of_each(self._stream, self._prefix + check_pattern(pattern))
        return [Entry(m.subject[cut:], m.data, m.seq) for m in stored if not is_marker(m)]

    def watch(self, on_change: Callable[[Change], None], pattern: str = ">") -> BucketWatch:
        kind = PulledWatch if self._session.api.elsewhere else BucketWatch
        return kind(self._session, self._stream, self._prefix, check_pattern(pattern), on_change)

    async def _last(self, key: str) -> StoredMessage | None:
        return await self._session.reader.message(self._stream, last_of=self._prefix + check_key(key))

    async def _write(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None = None,
        ttl_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> int:
        subject = self._prefix + check_key(key)
        try:
            ack = await self._session.publish(
                subject,
                value,
                headers=headers,
                msg_id=secrets.token_hex(16),  # the server counts ids for all writers: one that can be guessed is taken
                ttl_s=ttl_s,
                expect_last_subject_seq=revision,
                timeout_s=WRITE_TIMEOUT_S,
            )
        except TopologyError:
            raise TopologyError(f"there is no bucket {self.name}") from None
        return ack.seq


def is_marker(message: StoredMessage) -> bool:
    """Return True if the last message of a key marks the key as absent: deleted, purged, or removed by a limit."""
    headers = message.headers
    return headers is not None and (wire.MARKER_REASON in headers or headers.get(wire.KV_OPERATION) in ("DEL", "PURGE"))


def check_key(key: str) -> str:
    """Return `key`. Raises SubjectError if it is not a key; wildcards are refused, too."""
    if not _KEY.match(key):
        raise SubjectError(f"{key!r} is no key of a bucket")
    return key


def check_pattern(pattern: str) -> str:
    """Return `pattern`. Raises SubjectError if it is neither a key nor a pattern of keys."""
    if not _PATTERN.match(pattern):
        raise SubjectError(f"{pattern!r} is no pattern of keys")
    return pattern
