"""Key-value buckets, and watches that detect when their view may be stale.

A watch uses an ordered push consumer with short heartbeats. Whenever a delivery number, two heartbeats or the connection are
missing, it makes a new consumer, lists all keys again, and reports the keys that changed or vanished. A new consumer has a new
name; the old one is deleted, or expires after a few seconds without interest.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import structlog

from headrace.jetstream import metrics, wire
from headrace.jetstream.direct_get import ServerSession
from headrace.jetstream.errors import JetStreamError, RequestTimeout, RevisionConflict, SubjectError, TopologyError
from headrace.jetstream.ports import Change, Entry, KeyState, StoredMessage
from headrace.jetstream.raw_client import NUID, Tap

log = structlog.get_logger(__name__)

HEARTBEAT_S = 0.5
SILENCE_S = 2 * HEARTBEAT_S + 0.25
INACTIVE_S = 5.0
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
CREATE_TIMEOUT_S = 1.0

_names = NUID()


class BucketWatch:
    """A watch of a bucket; implements `ports.Watch`."""

    def __init__(
        self, session: ServerSession, stream: str, prefix: str, pattern: str, on_change: Callable[[Change], None]
    ) -> None:
        self._session = session
        self._core = session.core
        self._stream = stream
        self._prefix = prefix
        self._cut = len(prefix.encode())
        self._filter = prefix + pattern
        self._on_change = on_change
        self._known: dict[str, int] = {}  # key -> revision
        self._listed: set[str] | None = None  # keys seen by the listing in progress
        self._ready = asyncio.Event()
        self._wake = asyncio.Event()
        self._broken = True
        self._consumer = ""
        self._tap: Tap | None = None
        self._next_delivery = 1
        self._heard_at = 0.0
        self._backoff_s = 0.0

    async def ready(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise RequestTimeout(f"the listing of {self._filter} was not complete in {timeout_s} s") from None

    async def run(self) -> None:
        with self._session.hooks(up=self._on_up, down=self._on_down):
            try:
                while True:
                    if self._broken and self._core.up:
                        await self._start_over()
                    await self._sleep()
                    self._look_for_silence()
            finally:
                self._leave()

    # The consumer:

    async def _sleep(self) -> None:
        pause_s = self._backoff_s if self._broken and self._core.up and self._backoff_s else HEARTBEAT_S
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._wake.wait()

    def _look_for_silence(self) -> None:
        if not self._broken and asyncio.get_running_loop().time() - self._heard_at > SILENCE_S:
            log.info("watch.silent", filter=self._filter)
            self._break()

    def _on_up(self) -> None:
        self._backoff_s = 0.0
        self._break()

    def _on_down(self) -> None:
        self._broken = True
        self._drop_tap()

    def _break(self) -> None:
        """Start over with a new consumer, because the view may be out of date."""
        self._broken = True
        self._wake.set()

    def _drop_tap(self) -> None:
        if self._tap is not None:
            self._core.untap(self._tap)
            self._tap = None

    def _leave(self) -> None:
        self._drop_tap()
        if self._consumer:
            # The answer is not awaited: a consumer that this request does not reach expires by inactivity.
            deletion = self._session.api.subject(f"CONSUMER.DELETE.{self._stream}.{self._consumer}")
            self._core.send_now(wire.pub(deletion, b""))
            self._consumer = ""

    async def _start_over(self) -> None:
        self._leave()
        self._backoff_s = min(max(self._backoff_s * 2, BACKOFF_FIRST_S), BACKOFF_MAX_S)
        name = f"watch_{_names.next().decode()}"
        inbox = f"{self._session.inbox}.{name}"
        self._consumer = name
        self._next_delivery = 1
        self._listed = set()
        self._broken = False
        self._heard_at = asyncio.get_running_loop().time()
        self._tap = self._core.tap(inbox, self._on_message)
        config = {
            "name": name,
            "description": "a watch of headrace",
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "filter_subject": self._filter,
            "replay_policy": "instant",
            "inactive_threshold": wire.nanoseconds(INACTIVE_S),
            "mem_storage": True,
            "num_replicas": 1,
            **self._delivery(inbox),
        }
        metrics.WATCH_LISTINGS.inc()
        try:
            answer = await self._session.api.call(
                f"CONSUMER.CREATE.{self._stream}.{name}.{self._filter}",
                {"stream_name": self._stream, "config": config},
                timeout_s=CREATE_TIMEOUT_S,
            )
        except JetStreamError as error:
            log.info("watch.start_failed", filter=self._filter, error=str(error))
            self._broken = True
            return
        self._started(inbox)
        if not answer.get("num_pending", 0) and self._next_delivery == 1:
            self._end_of_listing()

    def _delivery(self, inbox: str) -> dict[str, Any]:
        """Return the consumer's settings for the delivery of changes to `inbox`."""
        return {
            "deliver_subject": inbox,
            "max_deliver": 1,
            "flow_control": True,
            "idle_heartbeat": wire.nanoseconds(HEARTBEAT_S),
        }

    def _started(self, inbox: str) -> None:
        """Note that the consumer was made."""

    # Received messages:

    def _on_message(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        fields = wire.decode_headers(headers) if headers else {}
        status = fields.get(wire.STATUS)
        if status is not None:
            self._on_status(status, fields, reply)
            return
        position = wire.parse_ack_subject(reply.decode())
        if position.consumer != self._consumer or self._broken:
            return
        if position.consumer_seq != self._next_delivery:
            log.info("watch.gap", filter=self._filter, expected=self._next_delivery, got=position.consumer_seq)
            self._break()
            return
        self._next_delivery += 1
        self._backoff_s = 0.0
        self._on_revision(subject[self._cut :].decode(), data, position.stream_seq, fields)
        if self._listed is not None and position.pending == 0:
            self._end_of_listing()

    def _on_status(self, status: str, fields: dict[str, str], reply: bytes) -> None:
        if status != "100":
            log.info("watch.refused", filter=self._filter, status=status, reason=fields.get(wire.DESCRIPTION, ""))
            self._break()
            return
        self._backoff_s = 0.0
        stalled = fields.get("Nats-Consumer-Stalled")
        if reply or stalled:  # flow control: the server waits for an empty reply
            self._core.send_now(wire.pub(reply.decode() or stalled or "", b""))
        last = fields.get("Nats-Last-Consumer", "")
        if last.isdigit() and int(last) >= self._next_delivery:
            self._break()

    def _on_revision(self, key: str, data: bytes, revision: int, fields: dict[str, str]) -> None:
        if fields.get(wire.ROLLUP) == "all" and self._listed is None:
            # No part writes so, and the server cannot be told to refuse it. The key is one that the writer may write.
            metrics.OTHERS_REMOVED.inc()
            log.warning("bucket.others_removed", stream=self._stream, key=key)
        if self._listed is not None:
            self._listed.add(key)
        reason = fields.get(wire.MARKER_REASON)
        operation = fields.get(wire.KV_OPERATION)
        if reason is not None or operation in ("DEL", "PURGE"):
            known = self._known.pop(key, None) is not None
            if known or (reason is None and self._ready.is_set()):
                # A writer's deletion says more than that the key is absent, so it is reported of a key that was missing, too.
                self._report(Change(key, None, revision, "expired" if reason == "MaxAge" else "delete"))
        elif self._known.get(key) != revision:
            self._known[key] = revision
            self._report(Change(key, data, revision))

    def _end_of_listing(self) -> None:
        listed, self._listed = self._listed, None
        if listed is not None:
            for key in [k for k in self._known if k not in listed]:
                self._report(Change(key, None, self._known.pop(key), "missing"))
        self._ready.set()

    def _report(self, change: Change) -> None:
        try:
            self._on_change(change)
        except Exception as error:  # a bug in the reader must not end the listing half way
            metrics.CALLBACK_ERRORS.inc()
            log.exception("watch.callback_failed", key=change.key, error=str(error))


BATCH = 1024
EXPIRES_S = 10.0
_EXPIRED = "408"


class PulledWatch(BucketWatch):
    """A watch by a pull consumer, for logins whose consumers a steward makes; implements `ports.Watch`.

    The maker of a push consumer chooses where it delivers, so such a login cannot be given one. Here the login requests a
    number of changes at its own inbox, and requests more before they have all arrived.
    """

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


DELETE_MARKER_TTL_S = 30.0
WRITE_TIMEOUT_S = 2.0

_KEY = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*\Z")
_PATTERN = re.compile(r"(([A-Za-z0-9_=/-]+|\*)\.)*([A-Za-z0-9_=/-]+|\*|>)\Z")


class KvBucket:
    """A key-value bucket; implements `ports.Bucket`. Writes carry an id, so that a repeat cannot conflict with itself.

    It uses the bucket's stream, not nats-py's `KeyValue`, which returns a live entry for a key whose lease has expired and
    refuses to create it again, because it does not know limit markers. Here a key whose last message is a marker of any kind is
    absent, and compare-and-set refers to the marker's sequence.
    """

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
    if not _KEY.match(key):
        raise SubjectError(f"{key!r} is no key of a bucket")
    return key


def check_pattern(pattern: str) -> str:
    """Return `pattern`. Raises SubjectError if it is neither a key nor a pattern of keys."""
    if not _PATTERN.match(pattern):
        raise SubjectError(f"{pattern!r} is no pattern of keys")
    return pattern
