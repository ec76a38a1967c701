"""`headrace.jetstream.ports.Messaging` over the simulated server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

from headrace.jetstream.errors import (
    JetStreamError,
    NoResponder,
    NotConnected,
    PayloadTooLarge,
    PublishUnknown,
    RequestTimeout,
)
from headrace.jetstream.ports import ConsumerSpec, Message, Outgoing, PubAck, StoredMessage, StreamState, Unacked
from tests.simulation.virtual.bucket_client import SimBucket, whole
from tests.simulation.virtual.follow import SimFollow
from tests.simulation.virtual.network import CORE, Conn, Sub, headers_of
from tests.simulation.virtual.objects import SimObjects
from tests.simulation.virtual.pull import SimPullLoop
from tests.support.grouped_publishes import publish_each

T = TypeVar("T")


MAX_PAYLOAD = 1024 * 1024


class SimMessaging:
    """One connection of one simulated process."""

    def __init__(self, conn: Conn) -> None:
        self.conn = conn
        self.world = conn.machine.world
        self.loop = conn.machine.loop
        self.server = self.world.server
        self.network = self.world.network
        self.answers: dict[str, asyncio.Future[bytes]] = {}
        self._numbers = count(1)
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._reconnecting: set[asyncio.Task[None]] = set()
        self._calls: dict[asyncio.Future[Any], None] = {}
        self._up = asyncio.Event()
        self._up.set()
        conn.on_up.append(self._came_up)
        conn.on_down.append(self._went_down)

    # the connection ----------------------------------------------------------------------------------------------------------
    @property
    def connected(self) -> bool:
        return self.conn.client_up

    @property
    def connected_since_s(self) -> float:
        return self.conn.since_s

    @property
    def max_payload(self) -> int:
        return MAX_PAYLOAD

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def drain(self) -> None:
        await self.close()

    async def close(self) -> None:
        """Everything sent before still arrives."""
        await asyncio.sleep(max(self.network.config.delays_s))
        self.network.up(self.conn, CORE, "close", self.server.detach, self.conn, sure=True)
        self.conn.client_up = False

    def _came_up(self) -> None:
        self._up.set()
        for callback in self._callbacks:
            task = self.loop.create_task(self._guarded(callback))
            self._reconnecting.add(task)
            task.add_done_callback(self._reconnecting.discard)

    def _went_down(self) -> None:
        self._up.clear()
        for future in (*self._calls, *self.answers.values()):
            _fail(future, NotConnected("the connection broke"))

    async def _guarded(self, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            await callback()
        except JetStreamError as error:
            self.world.log(self.conn.id, "reconnect callback failed:", repr(error))

    # core --------------------------------------------------------------------------------------------------------------------
    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        if self.conn.client_up:
            message = Message(subject, bytes(data), reply)
            self._log("send", subject, data, None)
            self.network.up(self.conn, CORE, f"send {subject}", self.server.send, self.conn.id, message)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        if not self.conn.client_up:
            raise NotConnected(f"cannot ask {subject}: not connected")
        inbox = f"_INBOX.{self.conn.id}.{next(self._numbers)}"
        future: asyncio.Future[bytes] = self.loop.create_future()
        self.answers[inbox] = future
        message = Message(subject, bytes(data), inbox)
        self._log("request", subject, data, None)
        self.network.up(self.conn, CORE, f"request {subject}", self._ask, message)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise RequestTimeout(f"no answer from {subject} within {timeout_s} s") from None
        finally:
            self.answers.pop(inbox, None)

    def _ask(self, message: Message) -> None:
        if self.server.route(self.conn.id, message) == 0:
            error = NoResponder(f"nobody listens on {message.subject}")
            self.network.down(self.conn, CORE, "no responders", self._refuse, message.reply, error)

    def _refuse(self, inbox: str, error: NoResponder) -> None:
        if (future := self.answers.get(inbox)) is not None and not future.done():
            future.set_exception(error)

    def answer(self, message: Message) -> None:
        """A reply has arrived."""
        if (future := self.answers.get(message.subject)) is not None and not future.done():
            future.set_result(message.data)

    async def subscribe(self, subject: str, on_message: Callable[[Message], None], *, queue: str = "") -> SimSubscription:
        sub = Sub(self.conn, subject, queue, on_message)
        self.conn.subs.append(sub)
        self.network.up(self.conn, CORE, f"subscribe {subject}", self.server.subscribe, sub, sure=True)
        return SimSubscription(self, sub)

    # streams -----------------------------------------------------------------------------------------------------------------
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
        if len(data) > MAX_PAYLOAD:
            raise PayloadTooLarge(f"{len(data)} bytes on {subject}, the server takes {MAX_PAYLOAD}")
        options = {"msg_id": msg_id, "ttl_s": whole(ttl_s), "expect_last_subject_seq": expect_last_subject_seq}
        message = Message(subject, bytes(data), "", headers_of(headers) or None)
        self._log(f"publish {msg_id or ''}", subject, data, headers)
        stream = self.server.stream_of(subject)
        lane = stream.spec.name if stream else CORE
        store = partial(self.server.publish, self.conn.id, message, options)
        return await self.write(lane, f"publish {subject}", store, timeout_s=timeout_s, repeat=msg_id is not None)

    async def publish_all(self, messages: Sequence[Outgoing], *, timeout_s: float = 2.0) -> list[PubAck | JetStreamError]:
        return await publish_each(self.publish, messages, timeout_s=timeout_s)

    def pull(
        self,
        stream: str,
        consumer: str,
        on_delivery: Callable[[Any], None],
        *,
        credit: int = 0,
        priority: int | None = None,
        expires_s: float = 2.0,
        on_missing: Callable[[], Awaitable[None]] | None = None,
    ) -> SimPullLoop:
        return SimPullLoop(
            self, stream, consumer, on_delivery, credit=credit, priority=priority, expires_s=expires_s, on_missing=on_missing
        )

    async def get_message(self, stream: str, seq: int) -> StoredMessage | None:
        return await self.ask(stream, "get message", lambda: self.server.stream(stream).messages.get(seq))

    async def delete_message(self, stream: str, seq: int) -> bool:
        return await self.ask(stream, f"delete {stream} #{seq}", lambda: self.server.stream(stream).remove(seq))

    async def subject_counts(self, stream: str, pattern: str) -> dict[str, int]:
        return await self.ask(stream, "subject counts", lambda: self.server.stream(stream).counts(pattern))

    async def subject_messages(
        self, stream: str, subject: str, *, limit: int = 1000, start_seq: int = 1
    ) -> list[StoredMessage]:
        return await self.ask(
            stream, "subject messages", lambda: self.server.stream(stream).of_subject(subject, limit, start_seq)
        )

    async def last_messages(self, stream: str, subjects: Sequence[str]) -> list[StoredMessage]:
        wanted = list(subjects)
        return await self.ask(stream, "last messages", lambda: self.server.stream(stream).last_of(wanted))

    def follow(self, stream: str, subject: str, *, start_seq: int, batch: int = 128) -> SimFollow:
        return SimFollow(self, stream, subject, start_seq, batch)

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        return await self.ask(stream, "stream state", lambda: self.server.state_of(stream, subject))

    async def purge_stream(self, stream: str, *, subject: str = "", up_to_seq: int = 0) -> int:
        return await self.ask(stream, f"purge {stream}", lambda: self.server.stream(stream).purge(subject, up_to_seq))

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        await self.ask(
            spec.stream, f"ensure consumer {spec.name}", lambda: self.server.stream(spec.stream).ensure_consumer(spec)
        )

    async def delete_consumer(self, stream: str, name: str) -> None:
        await self.ask(stream, f"delete consumer {name}", lambda: self.server.stream(stream).delete_consumer(name))

    async def consumer_subjects(self, stream: str) -> dict[str, tuple[str, ...]]:
        consumers = await self.ask(stream, "consumers", lambda: dict(self.server.stream(stream).consumers))
        return {name: consumer.spec.filter_subjects for name, consumer in consumers.items()}

    async def unacked(self, stream: str, consumer: str) -> Unacked:
        return await self.ask(stream, f"consumer {consumer}", lambda: self.server.stream(stream).unacked(consumer))

    def bucket(self, name: str) -> SimBucket:
        return SimBucket(self, name)

    def objects(self, name: str) -> SimObjects:
        return SimObjects(self, name)

    # calls to the server -----------------------------------------------------------------------------------------------------
    async def ask(self, lane: str, what: str, function: Callable[[], T]) -> T:
        """Run `function` in the server. Raises NotConnected, RequestTimeout, and what it raises."""
        if not self.conn.client_up:
            raise NotConnected(f"{what}: not connected")
        timeout_s = self.network.config.timeout_s
        return await self._call(lane, what, function, RequestTimeout, f"{what}: no answer within {timeout_s} s", timeout_s)

    async def write(self, lane: str, what: str, function: Callable[[], T], *, timeout_s: float, repeat: bool = False) -> T:
        """Store something. `repeat`: send it again after a reconnect. Raises PublishUnknown, and what `function` raises."""
        until = self.loop.time() + timeout_s
        unknown = f"{what}: not confirmed within {timeout_s} s"
        while True:
            if not self.conn.client_up:
                try:
                    async with asyncio.timeout_at(until):
                        await self._up.wait()
                except TimeoutError:
                    raise PublishUnknown(unknown) from None
            try:
                return await self._call(lane, what, function, PublishUnknown, unknown, until - self.loop.time())
            except NotConnected:
                if not repeat:
                    raise PublishUnknown(f"{what}: the connection broke") from None

    async def _call(
        self, lane: str, what: str, function: Callable[[], T], late: Callable[[str], Exception], why: str, timeout_s: float
    ) -> T:
        """Fail with `late(why)` after `timeout_s`: an error that is not raised costs the process no call."""
        future: asyncio.Future[T] = self.loop.create_future()
        self._calls[future] = None
        timer = self.loop.call_later(timeout_s, lambda: _fail(future, late(why)))
        self.network.up(self.conn, lane, what, self._serve, lane, what, future, function)
        try:
            return await future
        finally:
            timer.cancel()
            del self._calls[future]

    def _serve(self, lane: str, what: str, future: asyncio.Future[T], function: Callable[[], T]) -> None:
        try:
            result = function()
        except Exception as error:
            self.network.down(self.conn, lane, f"refusal of {what}", _fail, future, error)
        else:
            self.network.down(self.conn, lane, f"answer to {what}", _settle, future, result)

    def _log(self, kind: str, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        if self.world.tracing:
            self.world.log(self.conn.id, kind, subject, self.world.describe(subject, data, headers))


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


class SimSubscription:
    """Ends a core subscription."""

    def __init__(self, messaging: SimMessaging, sub: Sub) -> None:
        self._messaging = messaging
        self._sub = sub

    async def unsubscribe(self) -> None:
        messaging, sub = self._messaging, self._sub
        if sub in sub.conn.subs:
            sub.conn.subs.remove(sub)
            messaging.network.up(sub.conn, CORE, f"unsubscribe {sub.pattern}", messaging.server.unsubscribe, sub, sure=True)
