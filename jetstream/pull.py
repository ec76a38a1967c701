"""Pulls messages continuously, and requests at most as many from the server as there is credit.

The server does not say which pull request a message answers, so the loop counts what it asked for (`outstanding`) and subtracts
messages that arrive and requests that expire.  Whenever the count can no longer be trusted (an error status, a broken
connection, silence) it changes its inbox: requests on the old inbox lose their reader, and the count starts at zero.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count

import msgspec
import structlog

from headrace.jetstream import metrics, wire
from headrace.jetstream.direct_get import ServerSession
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Delivery
from headrace.jetstream.raw_client import CoreClient, Tap
from headrace.jetstream.raw_client import errors as nats_errors
from headrace.jetstream.tasks import TaskScope


class StreamDelivery:
    """A delivery; implements `ports.Delivery`. Headers and the ack subject are parsed only when they are read."""

    __slots__ = ("_ack", "_core", "_headers", "_raw_headers", "_reply", "_subject", "data")

    def __init__(self, core: CoreClient, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._core = core
        self._subject = subject
        self._reply = reply
        self.data = data
        self._raw_headers = headers
        self._headers: Mapping[str, str] | None = None
        self._ack: wire.AckSubject | None = None

    def __repr__(self) -> str:
        return f"StreamDelivery(subject={self.subject!r}, stream_seq={self.stream_seq}, num_delivered={self.num_delivered})"

    @property
    def subject(self) -> str:
        return self._subject.decode(errors="replace")

    @property
    def headers(self) -> Mapping[str, str]:
        if self._headers is None:
            self._headers = wire.decode_headers(self._raw_headers)
        return self._headers

    @property
    def _position(self) -> wire.AckSubject:
        if self._ack is None:
            self._ack = wire.parse_ack_subject(self._reply.decode())
        return self._ack

    @property
    def stream_seq(self) -> int:
        return self._position.stream_seq

    @property
    def num_delivered(self) -> int:
        return self._position.num_delivered

    @property
    def pending(self) -> int:
        return self._position.pending

    @property
    def stored(self) -> float:
        return self._position.stored

    def ack(self) -> None:
        self._say(wire.ACK)

    def nak(self, delay_s: float = 0.0) -> None:
        self._say(wire.nak_body(delay_s))

    def progress(self) -> None:
        self._say(wire.PROGRESS)

    def term(self, reason: str = "") -> None:
        self._say(b"%b %b" % (wire.TERM, reason.replace("\r", " ").replace("\n", " ").encode()) if reason else wire.TERM)

    def _say(self, what: bytes) -> None:
        self._core.send_now(b"PUB %b %d\r\n%b\r\n" % (self._reply, len(what), what))


log = structlog.get_logger(__name__)

GROUP = "g"  # the one priority group of a prioritized consumer
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 0.5
RECOVER_S = 0.5  # after which messages are asked for again although `on_missing` goes on: in an election it gets no answer
SILENT_HEARTBEATS = 1.5  # after which messages are asked for again: who was asked may lead the consumer no more
MISSING_AFTER = 2  # such silences in a row, after which the consumer may be gone
LATE_S = 0.2  # of this process: what has come meanwhile may wait to be read
STOP_BARRIER_S = 1.0
LEAST_S = 0.02  # between two looks

_inboxes = count(1)


class _PullRequest(msgspec.Struct, omit_defaults=True):
    batch: int
    expires: int
    idle_heartbeat: int
    group: str = ""
    priority: int = 0


@dataclass(frozen=True)
class PullOptions:
    """Options of a pull loop. `priority` is None where the consumer has no priority groups; `on_missing` is awaited when the
    consumer does not exist or was deleted, before the next try."""

    credit: int = 0
    priority: int | None = None
    expires_s: float = 2.0
    on_missing: Callable[[], Awaitable[None]] | None = None


class StreamPull:
    """A pull loop; implements `ports.PullLoop`."""

    def __init__(
        self,
        session: ServerSession,
        stream: str,
        consumer: str,
        on_delivery: Callable[[Delivery], None],
        options: PullOptions,
    ) -> None:
        self.stream = stream
        self.consumer = consumer
        self._session = session
        self._core = session.core
        self._inbox_base = f"{session.inbox}.p{next(_inboxes)}"
        self._on_delivery = on_delivery
        self._on_missing = options.on_missing
        self._credit = max(0, options.credit)
        self._expires_s = options.expires_s
        self._heartbeat_s = min(0.5, options.expires_s / 2)
        self._request = _PullRequest(
            batch=0,
            expires=wire.nanoseconds(options.expires_s),
            idle_heartbeat=wire.nanoseconds(self._heartbeat_s),
            group="" if options.priority is None else GROUP,
            priority=options.priority or 0,
        )
        self._next_subject = session.api.subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}")
        self._tap: Tap | None = None
        self._old: list[Tap] = []
        self._inbox = ""
        self._generations = count(1)
        self._outstanding = 0
        self._heard_at = 0.0
        self._last_request_at = 0.0
        self._backoff_s = 0.0
        self._blocked_until = 0.0
        self._missing = False
        self._silences = 0
        self._scheduled = False
        self._running = False
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._done = asyncio.Event()

    # Credit:

    @property
    def credit(self) -> int:
        return self._credit

    @property
    def outstanding(self) -> int:
        return self._outstanding

    def add_credit(self, n: int = 1) -> None:
        self._credit = max(0, self._credit + n)
        if self._outstanding > self._credit:
            self._renew("credit")
        self._schedule()

    def _schedule(self) -> None:
        """Request messages at the end of this loop tick, so that credits returned one by one make one request."""
        if self._running and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._refill)

    def _refill(self) -> None:
        self._scheduled = False
        if not self._running or not self._core.up:
            return
        missing = self._credit - self._outstanding
        # The server keeps few requests open per consumer. While plenty is outstanding, wait until a request is worth it.
        if missing < 1 or missing < self._outstanding // 2:
            return
        now = self._loop.time()
        if now < self._blocked_until:
            return
        if self._tap is None:
            self._inbox = f"{self._inbox_base}.{next(self._generations)}"
            self._tap = self._core.tap(self._inbox, self._on_message)
        self._request.batch = missing
        if self._outstanding == 0:
            self._heard_at = now
        if self._core.send_now(wire.pub(self._next_subject, msgspec.json.encode(self._request), self._inbox)):
            self._outstanding += missing
            self._last_request_at = now

    # Received messages:

    def _on_message(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        if headers is not None:
            status = wire.status_of(headers)
            if status:
                self._on_status(status, headers)
                return
        self._heard_at = self._loop.time()
        self._silences = 0
        self._backoff_s = 0.0
        if self._outstanding > 0:
            self._outstanding -= 1
        delivery = StreamDelivery(self._core, subject, reply, data, headers)
        if self._credit < 1:
            delivery.nak()
            return
        self._credit -= 1
        self._on_delivery(delivery)

    def _on_status(self, status: int, headers: bytes) -> None:
        self._heard_at = self._loop.time()
        self._silences = 0
        if status == 100:
            return
        fields = wire.decode_headers(headers)
        pending = fields.get(wire.PENDING_MESSAGES, "")
        if status == 408 and pending.isdigit():  # the request has expired; the rest of its messages do not come
            self._outstanding = max(0, self._outstanding - int(pending))
            self._backoff_s = 0.0
            self._schedule()
            return
        description = fields.get(wire.DESCRIPTION, "")
        log.info("pull.refused", stream=self.stream, consumer=self.consumer, status=status, reason=description)
        self._missing = self._missing or status in (404, 503) or "deleted" in description.lower()
        self._backoff_s = min(max(self._backoff_s * 2, BACKOFF_FIRST_S), BACKOFF_MAX_S)
        self._blocked_until = self._heard_at + self._backoff_s
        self._renew(str(status))
        self._wake.set()

    def _refuse(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        """Nak a message that arrives at an inbox that is no longer used."""
        if reply.startswith(b"$JS.ACK."):
            StreamDelivery(self._core, subject, reply, data, headers).nak()

    def _renew(self, reason: str) -> Tap | None:
        """Change the inbox, which abandons every open request. Returns the old tap, if there was one."""
        self._outstanding = 0
        if self._tap is None:
            return None
        metrics.PULL_RESETS.labels(reason).inc()
        tap, self._tap = self._tap, None
        self._core.silence(tap, self._refuse)
        self._keep(tap)
        return tap

    def _keep(self, tap: Tap) -> None:
        """Hear what arrives at an inbox that is no longer used until the requests that name it have expired."""
        self._old.append(tap)
        self._loop.call_later(self._expires_s, self._drop, tap)

    def _drop(self, tap: Tap) -> None:
        self._old.remove(tap)
        self._core.untap(tap)

    # Events of the connection:

    def connection_down(self) -> None:
        old = [*self._old, self._tap]
        self._renew("disconnected")
        if self._core.leaving:
            # The server is left, but not gone: until the requests made there expire others send messages to their inboxes, by
            # way of that server. They are heard at the next server too, or would come again only after `ack_wait`.
            for subject in {tap.subject for tap in old if tap is not None}:
                self._keep(self._core.tap(subject, self._on_late))

    def _on_late(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        """Take a message that was requested from a server that was left."""
        if not reply.startswith(b"$JS.ACK."):
            return
        if self._credit < 1 or not self._running:
            self._refuse(subject, reply, data, headers)
            return
        self._credit -= 1
        self._on_delivery(StreamDelivery(self._core, subject, reply, data, headers))

    def connection_up(self) -> None:
        self._blocked_until = 0.0
        self._backoff_s = 0.0
        self._schedule()

    # Running:

    async def run(self) -> None:
        """Pull until `stop` or cancellation. No message is delivered afterwards."""
        with self._session.hooks(up=self.connection_up, down=self.connection_down):
            await self._run()

    async def _run(self) -> None:
        if self._stopped:
            return
        self._running = True
        self._done.clear()
        try:
            self._refill()
            async with TaskScope() as tasks:
                await self._keep_pulling(tasks)
        finally:
            self._running = False
            self._renew("stopped")
            self._done.set()

    async def _keep_pulling(self, tasks: TaskScope) -> None:
        recovery: asyncio.Task[None] | None = None
        try:
            while not self._stopped:
                late = await self._sleep(self._heartbeat_s)
                if self._missing and self._core.up and (recovery is None or recovery.done()):
                    recovery = tasks.spawn(self._recover())
                    await asyncio.wait({recovery}, timeout=RECOVER_S)
                if not late:
                    self._watch()
                self._schedule()
        finally:
            if recovery is not None:
                recovery.cancel()

    async def _sleep(self, longest_s: float) -> bool:
        """Wait until there is work. Returns True if this process was frozen meanwhile."""
        now = self._loop.time()
        until = now + longest_s
        if self._blocked_until > now:
            until = min(until, self._blocked_until)
        if self._outstanding:
            until = min(until, max(now + LEAST_S, self._heard_at + SILENT_HEARTBEATS * self._heartbeat_s))
        try:
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        except TimeoutError:
            return self._loop.time() - until > LATE_S
        self._wake.clear()
        return False

    async def _recover(self) -> None:
        self._missing = False
        if self._on_missing is None:
            return
        log.info("consumer.missing", stream=self.stream, consumer=self.consumer)
        try:
            await self._on_missing()
        except JetStreamError as error:
            log.warning("consumer.recreate_failed", stream=self.stream, consumer=self.consumer, error=str(error))
            self._missing = True
            if self._outstanding:
                return  # it was there all the time, and a pull has found it
            self._backoff_s = min(max(self._backoff_s * 2, BACKOFF_FIRST_S), BACKOFF_MAX_S)
            self._blocked_until = asyncio.get_running_loop().time() + self._backoff_s

    def _watch(self) -> None:
        if self._outstanding == 0 or not self._core.up:
            return
        now = self._loop.time()
        silent = now - self._heard_at >= SILENT_HEARTBEATS * self._heartbeat_s
        overdue = now - self._last_request_at > self._expires_s + 1.0
        if silent or overdue:
            log.info("pull.silent", stream=self.stream, consumer=self.consumer, outstanding=self._outstanding)
            self._renew("silent" if silent else "overdue")
            self._silences += silent
            self._missing = self._missing or self._silences >= MISSING_AFTER  # it may be gone without a message that says so

    async def stop(self) -> None:
        """End `run`. If the connection is up, wait until messages in flight have been given back."""
        self._stopped = True
        was_running = self._running
        self._running = False
        self._credit = 0
        left = self._renew("stopped")
        self._wake.set()
        if was_running:
            await self._done.wait()
        if left is not None and self._core.up:
            with contextlib.suppress(TimeoutError, nats_errors.Error):
                await self._core.barrier(STOP_BARRIER_S)
