"""The connection to NATS: implements `ports.Messaging` on nats-py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlparse

import structlog

from headrace.jetstream import metrics, wire
from headrace.jetstream.api import (
    CONSUMER_NOT_FOUND,
    CONSUMER_NOT_MADE,
    INBOXES,
    STREAM_NOT_FOUND,
    ApiError,
    JsApi,
    SubjectPattern,
    from_stream,
)
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.dial import abandon, check_server, dial, given_up_on_error
from headrace.jetstream.direct_get import Reader
from headrace.jetstream.errors import (
    AccessDenied,
    JetStreamDisabled,
    JetStreamError,
    NoResponder,
    NotConnected,
    PayloadTooLarge,
    RequestTimeout,
    ServerUnreachable,
    TopologyError,
)
from headrace.jetstream.follow import StreamFollow
from headrace.jetstream.objects import ObjectStore
from headrace.jetstream.ports import ConsumerSpec, Delivery, Message, Outgoing, PubAck, StoredMessage, StreamState, Unacked
from headrace.jetstream.publish import Mux
from headrace.jetstream.pull import PullOptions, StreamPull
from headrace.jetstream.raw_client import NUID, CoreClient, Tap
from headrace.jetstream.raw_client import errors as nats_errors
from headrace.jetstream.specs import consumer_config
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import end_tasks
from headrace.jetstream.watch import KvBucket

log = structlog.get_logger(__name__)

DRAIN_TIMEOUT_S = 5.0
TASKS_S = 5.0  # for the ends of a connection's own tasks
CANCEL_AGAIN_S = 2.5  # of one that goes on
REMIND_S = 10.0
LOOK_S = 0.1
UNSTORED_S = 2.5  # of tries in vain, before another server of a cluster is tried
LEAVE_AGAIN_S = 10.0  # an election also stores nothing, for 4 to 9 s
KNOW_ALL_S = 2.0  # after the server was left

__all__ = ["ConnectOptions", "Connection"]


class _Server:
    """Calls the server and the steward through an inbox that no other process sees; implements `api.Caller`."""

    def __init__(self, mux: Mux) -> None:
        self._mux = mux

    async def request(self, subject: str, data: bytes, *, timeout_s: float, repeated: bool = False) -> bytes:
        return (await self._mux.request(subject, data, timeout_s=timeout_s, repeated=repeated)).data


class Connection:
    """A connection that reconnects without limit. Open it with `Connection.connect`; use it as an async context manager."""

    def __init__(self, core: CoreClient, options: ConnectOptions, subjects: Subjects) -> None:
        self.options = options
        self.subjects = subjects
        self._core = core
        inbox = f"{options.inbox}.{NUID().next().decode()}"
        self._inbox = inbox
        shown = f"{options.inbox}.{NUID().next().decode()}"
        self._mux = Mux(core, inbox, shown=shown, api_prefix=options.js_api)
        self.api = JsApi(_Server(self._mux), prefix=options.js_api, steward=options.steward or "", asked=options.asked)
        self.reader = Reader(core, self.api, inbox)
        self._connected_since_s = 0.0
        self._reconnect_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._down_hooks: list[Callable[[], None]] = []
        self._up_hooks: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._last_error = ("", 0.0)
        core.on_restored = lambda: self._on_up(first=False)
        core.on_down = self._on_down
        core.on_leave = self._on_leave
        core.on_error = self._on_error
        core.on_permission_error = self._on_permission_error

    # Connecting:

    @classmethod
    async def connect(cls, options: ConnectOptions, *, subjects: Subjects) -> Self:
        """Connect to a server and check its version and JetStream.

        Raises ServerUnreachable, AccessDenied, ServerTooOld, JetStreamDisabled, or ConnectError for unusable options.
        """
        core = await dial(options)
        connection = cls(core, options, subjects)
        connection._on_up(first=True)
        async with given_up_on_error(core, options):
            await check_server(core.info, connection.api, options)
        if len(options.servers) > 1:
            connection._start(connection._watch_server())
        return connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def drain(self) -> None:
        """Wait until everything sent has reached the server, then close."""
        with contextlib.suppress(TimeoutError, nats_errors.Error):
            await self._core.barrier(DRAIN_TIMEOUT_S)
        await self.close()

    async def close(self) -> None:
        """Close now. Calls that still wait end with NotConnected or PublishUnknown."""
        if self._closing:
            return
        self._closing = True
        if self._core.up:
            self._core._write_pending()
        self._core.mark_down()
        try:
            for task in await end_tasks(self._tasks, within_s=TASKS_S, again_s=CANCEL_AGAIN_S):
                log.error("connection.task_left", task=repr(task))
        finally:
            await abandon(self._core)

    # State:

    @property
    def connected(self) -> bool:
        return self._core.up

    @property
    def connected_since_s(self) -> float:
        return self._connected_since_s

    @property
    def max_payload(self) -> int:
        return int(self._core.max_payload)

    @property
    def server_version(self) -> str:
        return str(self._core.info.get("version", ""))

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        self._reconnect_callbacks.append(callback)

        def forget() -> None:
            with contextlib.suppress(ValueError):  # it was forgotten before
                self._reconnect_callbacks.remove(callback)

        return forget

    def _on_up(self, *, first: bool) -> None:
        self._connected_since_s = asyncio.get_running_loop().time()
        self._core.mark_up()
        metrics.CONNECTED.inc()
        self._mux.up()
        for hook in list(self._up_hooks):
            hook()
        if first:
            return
        metrics.RECONNECTS.inc()
        for callback in list(self._reconnect_callbacks):
            self._start(self._guarded(callback))
        _report("connection.restored", server=self.options.address)

    def _on_down(self) -> None:
        metrics.CONNECTED.dec()
        self._mux.down()
        self.reader.down()
        for hook in list(self._down_hooks):
            hook()
        if not self._closing:
            _report("connection.lost", server=self.options.address)

    async def _watch_server(self) -> None:
        """Repeat calls that a cluster leaves unanswered, and leave a server that cannot store for another one.

        A server that a partition has left in the minority keeps its clients and answers their pings.
        """
        loop = asyncio.get_running_loop()
        looked, not_before = loop.time(), 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            before, looked = looked, loop.time()
            if not self._core.up or looked - before > 2 * LOOK_S:  # this process stood still: answers may wait to be read
                continue
            self._mux.repeat_unanswered(looked)
            if looked >= not_before and self._mux.unstored_s(looked) > UNSTORED_S:
                not_before = looked + LEAVE_AGAIN_S
                await self._core.leave()

    def _on_leave(self) -> None:
        here = self._core.connected_url.netloc if self._core.connected_url else ""
        others = [url for url in self.options.servers if urlparse(url if "://" in url else f"nats://{url}").netloc != here]
        if others:
            metrics.NODES_LEFT.inc()
            unstored_s = self._mux.unstored_s(asyncio.get_running_loop().time())
            why = "nothing is stored there" if unstored_s > UNSTORED_S else "it answers no pings"
            _report("connection.moved", server=here, why=why)
            self._core.set_server_pool(others)
            asyncio.get_running_loop().call_later(KNOW_ALL_S, self._know_all)

    def _know_all(self) -> None:
        if not self._core.is_closed:
            self._core.set_server_pool(list(self.options.servers))

    def _on_error(self, text: str) -> None:
        """Log each new error once, with a reminder every REMIND_S: an absent server fails four tries a second."""
        now = asyncio.get_running_loop().time()
        if self._closing or (text == self._last_error[0] and now - self._last_error[1] < REMIND_S):
            return
        self._last_error = (text, now)
        _report("connection.error", server=self.options.address, error=text)

    def _on_permission_error(self, text: str) -> None:
        self._mux.denied(text)
        _report("permission.denied", server=self.options.address, error=text)

    async def _guarded(self, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            await callback()
        except JetStreamError as error:
            log.warning("reconnect.callback_failed", error=str(error))
        except Exception as error:
            log.exception("reconnect.callback_failed", error=str(error))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.contextmanager
    def hooks(self, *, up: Callable[[], None], down: Callable[[], None]) -> Iterator[None]:
        """Call `up` and `down` as the connection comes and goes, synchronously and before the callbacks of `on_reconnect`."""
        self._up_hooks.append(up)
        self._down_hooks.append(down)
        try:
            yield
        finally:
            self._up_hooks.remove(up)
            self._down_hooks.remove(down)

    # Core:

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Send without waiting. Raises PayloadTooLarge; every other failure is counted and ignored."""
        if len(data) > self._core.max_payload:
            raise PayloadTooLarge(f"{len(data)} bytes to {subject} are over the server's limit of {self._core.max_payload}")
        self._core.send_now(wire.pub(subject, data, reply))

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        return (await self._mux.request(subject, data, timeout_s=timeout_s, shown=True)).data

    async def subscribe(self, subject: str, on_message: Callable[[Message], None], *, queue: str = "") -> CoreSubscription:
        sent_to = SubjectPattern(subject)

        def handler(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            if not sent_to.covers(subject) or (headers is not None and from_stream(headers)):
                metrics.DROPPED.labels("not_published").inc()  # the server's answer to a question, not a message of a process
                return
            answer_at = reply.decode() if reply.startswith(INBOXES) else ""  # and at no other subject: it is not the asker's
            on_message(Message(subject.decode(), data, answer_at, wire.decode_headers(headers) if headers else None))

        return CoreSubscription(self._core, self._core.tap(subject, handler, queue=queue))

    async def barrier(self, timeout_s: float = 2.0) -> None:
        """Return once the server has handled everything sent before. Raises RequestTimeout, NotConnected."""
        try:
            await self._core.barrier(timeout_s)
        except TimeoutError:
            raise RequestTimeout(f"the server did not answer a ping in {timeout_s} s") from None
        except nats_errors.Error:
            raise NotConnected from None

    # Streams:

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        msg_id: str | None = None,
        ttl_s: float | None = None,
        expect_last_subject_seq: int | None = None,
        timeout_s: float = 2.0,
    ) -> PubAck:
        all_headers = wire.publish_headers(headers, msg_id, expect_last_subject_seq)
        if ttl_s is not None:
            all_headers[wire.TTL] = wire.ttl_value(ttl_s)
        return await self._mux.publish(subject, data, all_headers, timeout_s=timeout_s)

    async def publish_all(self, messages: Sequence[Outgoing], *, timeout_s: float = 2.0) -> list[PubAck | JetStreamError]:
        ready = [(one.subject, one.data, wire.publish_headers(*one[2:])) for one in messages]
        return await self._mux.publish_all(ready, timeout_s=timeout_s)

    def pull(
        self,
        stream: str,
        consumer: str,
        on_delivery: Callable[[Delivery], None],
        *,
        credit: int = 0,
        priority: int | None = None,
        expires_s: float = 2.0,
        on_missing: Callable[[], Awaitable[None]] | None = None,
    ) -> StreamPull:
        """Return a pull loop. It awaits `on_missing` when the consumer does not exist or was deleted, before the next try."""
        options = PullOptions(credit=credit, priority=priority, expires_s=expires_s, on_missing=on_missing)
        return StreamPull(self, stream, consumer, on_delivery, options)

    async def get_message(self, stream: str, seq: int) -> StoredMessage | None:
        return await self.reader.message(stream, seq=seq)

    async def delete_message(self, stream: str, seq: int) -> bool:
        return await self.reader.delete(stream, seq)

    async def subject_counts(self, stream: str, pattern: str) -> dict[str, int]:
        return await self.reader.subject_counts(stream, pattern)

    async def subject_messages(
        self, stream: str, subject: str, *, limit: int = 1000, start_seq: int = 1
    ) -> list[StoredMessage]:
        return await self.reader.following(stream, subject, limit=limit, start_seq=start_seq)

    async def last_messages(self, stream: str, subjects: Sequence[str]) -> list[StoredMessage]:
        return await self.reader.last_of_subjects(stream, subjects)

    async def last_message(self, stream: str, subject: str, *, timeout_s: float = 5.0) -> StoredMessage | None:
        """Return the last message of a subject, by a call that names the subject, so that a login can be limited to some.

        Raises TopologyError, RequestTimeout, NotConnected, AccessDenied.
        """
        call = self.api.subject(f"DIRECT.GET.{stream}.{subject}")
        try:
            answer = await self._mux.request(call, b"", timeout_s=timeout_s)
        except NoResponder:
            raise TopologyError(f"there is no stream {stream} that can be read directly") from None
        if answer.status == 404:
            return None
        headers = wire.decode_headers(answer.headers)
        if answer.status or wire.SEQUENCE not in headers:
            raise JetStreamError(f"reading {stream} failed: {answer.status} {headers.get(wire.DESCRIPTION, '')}")
        own = {name: value for name, value in headers.items() if name not in wire.READ_HEADERS}
        at = wire.unix_time(headers.get(wire.TIME_STAMP, ""))
        return StoredMessage(subject, int(headers[wire.SEQUENCE]), answer.data, own or None, at)

    def follow(self, stream: str, subject: str, *, start_seq: int, batch: int = 128) -> StreamFollow:
        return StreamFollow(self, stream, subject, start_seq=start_seq, batch=batch)

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        return await self.reader.state(stream, subject=subject)

    async def purge_stream(self, stream: str, *, subject: str = "", up_to_seq: int = 0) -> int:
        return await self.reader.purge(stream, subject=subject, up_to_seq=up_to_seq)

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        try:
            await self._make_consumer(spec)
        except ApiError as error:
            if error.err_code != CONSUMER_NOT_MADE or not await self._made_in_memory(spec):
                raise TopologyError(f"consumer {spec.name} of {spec.stream} cannot be made: {error}") from None

    async def _make_consumer(self, spec: ConsumerSpec, **changed: object) -> None:
        config = {**consumer_config(spec), **changed}
        # With the filter in the subject it is what a permission allows; the server compares it with the configuration's.
        only = f".{spec.filter_subjects[0]}" if len(spec.filter_subjects) == 1 else ""
        subject = f"CONSUMER.CREATE.{spec.stream}.{spec.name}{only}"
        await self.api.call(subject, {"stream_name": spec.stream, "config": config})

    async def _made_in_memory(self, spec: ConsumerSpec) -> bool:
        """Make a consumer in memory whose file is damaged: the server never makes it again from that, and cannot delete it.

        Its acks are forgotten at the next restart of the server, so messages are delivered again then: workers ask about them.
        """
        try:
            await self._make_consumer(spec, mem_storage=True)
        except ApiError:  # there is another reason
            return False
        log.warning("consumer.in_memory", stream=spec.stream, consumer=spec.name)
        return True

    async def delete_consumer(self, stream: str, name: str) -> None:
        try:
            await self.api.call(f"CONSUMER.DELETE.{stream}.{name}")
        except ApiError as error:
            if error.err_code not in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
                raise TopologyError(f"consumer {name} of {stream} cannot be deleted: {error}") from None

    async def consumer_subjects(self, stream: str) -> dict[str, tuple[str, ...]]:
        return await self.reader.consumer_subjects(stream)

    async def unacked(self, stream: str, consumer: str) -> Unacked:
        info = await self.api.call(f"CONSUMER.INFO.{stream}.{consumer}")
        return Unacked(info["ack_floor"]["stream_seq"], info["delivered"]["stream_seq"], info["num_ack_pending"])

    def bucket(self, name: str) -> KvBucket:
        return KvBucket(self, name)

    def objects(self, name: str) -> ObjectStore:
        return ObjectStore(self, name)

    @property
    def core(self) -> CoreClient:
        return self._core

    @property
    def inbox(self) -> str:
        return self._inbox


class CoreSubscription:
    def __init__(self, core: CoreClient, tap: Tap) -> None:
        self._core = core
        self._tap = tap

    async def unsubscribe(self) -> None:
        self._core.untap(self._tap)


def _report(event: str, **fields: str) -> None:
    """Log a warning without raising: an error (a closed log, say) would end the client's tasks, and so the connection."""
    with contextlib.suppress(Exception):
        log.warning(event, **fields)


RETRY_S = 0.5
DENIALS = 4  # refusals in a row after waiting: a server that reloads its configuration refuses every login


async def connect_patiently(
    options: ConnectOptions, *, subjects: Subjects, timeout_s: float, on_waiting: Callable[[str], None] | None = None
) -> Connection:
    """Wait up to `timeout_s` for a server that does not answer, and without limit for one that runs without JetStream.

    An operator may enable JetStream later without restarting this process. `on_waiting(reason)` is called at each failed try.

    Raises ServerUnreachable after that time, and every other ConnectError at once.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    told, told_s = "", 0.0
    denied = 0
    while True:
        try:
            return await Connection.connect(options, subjects=subjects)
        except (ServerUnreachable, JetStreamDisabled, AccessDenied) as error:
            denied = denied + 1 if isinstance(error, AccessDenied) else 0
            if (isinstance(error, ServerUnreachable) and loop.time() >= deadline) or (
                denied and (not told or denied > DENIALS)
            ):
                raise
            reason = str(error)
        if reason != told or loop.time() - told_s >= REMIND_S:
            told, told_s = reason, loop.time()
            log.warning("broker.waiting", reason=reason)
        if on_waiting is not None:
            on_waiting(reason)
        await asyncio.sleep(RETRY_S)
