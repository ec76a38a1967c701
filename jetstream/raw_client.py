"""nats-py's client with a parser, taps and sends that are fast enough for tokens.

All modules of this package take nats-py from here: it is imported without its WebSocket client. If aiohttp is installed, as it
is with vLLM, nats-py imports it, which took a fifth of the start time of a process. An address with `ws://` is refused
(`context`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import structlog

from headrace.base.process import hidden
from headrace.jetstream import metrics
from headrace.jetstream.tasks import end_tasks

__all__ = ["NUID", "PING_PROTO", "Client", "Parser", "Subscription", "TcpTransport", "command", "errors"]

with hidden("aiohttp"):
    from nats import errors
    from nats.aio.client import PING_PROTO, Client
    from nats.aio.subscription import Subscription
    from nats.aio.transport import TcpTransport
    from nats.nuid import NUID
    from nats.protocol import command
    from nats.protocol.parser import Parser


# sid, subject, reply, payload, raw header block
OnMessage = Callable[[int, bytes, bytes, bytes, bytes | None], None]

_END = b"\r\n"
_INITIALS = b"MH"  # of MSG and HMSG


class MessageParser(Parser):  # type: ignore[misc]  # nats-py has no type marker
    """Parses the messages of a server, in reads of any size, without a regular expression and a coroutine each.

    The plain client matches one or two patterns per message, moves the rest of its buffer twice and starts a coroutine. Here a
    message is two searches and two slices. All other lines of the protocol, which are rare, go to the plain parser.
    """

    def __init__(self, client: Any, on_message: OnMessage) -> None:
        """`on_message` must not raise. `client` gets all other lines, as nats-py has it."""
        self._on_message = on_message
        self._parts: list[bytes] = []  # of a line or message that is not whole yet
        self._size = 0  # bytes in them
        self._needed = 0  # at least so many are needed to go on
        super().__init__(client)

    def reset(self) -> None:
        """Drop a partial message: the connection that it came by has ended."""
        super().reset()
        self._parts = []
        self._size = self._needed = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take the bytes of one read. Raises ProtocolError."""
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return
            data = b"".join(self._parts)
        parts = self._parts = []  # of this connection: `reset` replaces the list
        on_message, length = self._on_message, len(data)
        at = needed = 0
        while (line_end := data.find(_END, at)) >= 0:
            begin = line_end + 2
            if data[at] not in _INITIALS:
                await super().parse(data[at:begin])
                if parts is not self._parts:
                    return
                if self.buf:
                    raise errors.ProtocolError(f"nats: unknown line {bytes(self.buf[:100])!r}")
                at = begin
                continue
            sid, subject, reply, headers, size = _first_line(data[at:line_end])
            end = begin + size
            if length < end + 2:
                needed = end + 2 - at
                break
            if headers:
                body = begin + headers
                on_message(sid, subject, reply, data[body:end], data[begin:body])
            else:
                on_message(sid, subject, reply, data[begin:end], None)
            at = end + 2
        if at < length:
            parts.append(data[at:])
            self._size, self._needed = length - at, needed


def _first_line(line: bytes) -> tuple[int, bytes, bytes, int, int]:
    """Return sid, subject, reply, bytes of the headers and of all. Raises ProtocolError."""
    words = line.split()
    try:
        if words[0] == b"MSG":
            _, subject, sid, *reply, size = words
            headers, whole = 0, int(size)
        else:
            kind, subject, sid, *reply, head, size = words
            headers, whole = int(head), int(size)
            if kind != b"HMSG":
                raise ValueError
        if not 0 <= headers <= whole or len(reply) > 1:
            raise ValueError
        return int(sid), subject, reply[0] if reply else b"", headers, whole
    except (ValueError, IndexError):
        raise errors.ProtocolError(f"nats: malformed line {line[:100]!r}") from None


# Adapts nats-py's client: replaces the parts that are too slow for a token path or that can end a process.
#
# Differences from the plain client, and their reasons:
#
# * Messages go from the parser straight into a synchronous callback (a tap). There is no message object, no queue and no task
# switch in between; no buffer can overflow in this process, a slow reader slows the socket instead, and the callbacks of all
# taps run in the order in which the server sent the messages. * `send_now` is synchronous: it appends to the client's own
# outgoing list and writes it to the socket once per loop tick. All messages of one connection keep their order, from any
# sender. * An error line of the server leads to a reconnect. The plain client closes for good on most of them. * Messages
# that wait to be sent when a connection breaks are dropped, not replayed into the next one: acks, frames and pull requests of
# an old connection only do harm on a new one.
#
# The overridden names are private to nats-py, which is why its version is pinned to one minor release.

log = structlog.get_logger(__name__)

# (subject, reply, payload, raw header block)
RawHandler = Callable[[bytes, bytes, bytes, bytes | None], None]

PENDING_SIZE = 64 * 1024 * 1024  # bytes that may wait for the socket before messages are dropped
CANCEL_AGAIN_S = 0.05
CANCEL_S = 2.0
CLOSE_S = 2.0  # for the end of a socket


class Tap(Subscription):  # type: ignore[misc]  # nats-py has no type marker
    """A subscription whose messages the parser passes to a callback, without a queue or a task."""

    def __init__(self, client: CoreClient, sid: int, subject: str, queue: str, handler: RawHandler) -> None:
        super().__init__(client, sid, subject, queue=queue, future=None, pending_msgs_limit=1)
        self.handler = handler
        self.sid = sid
        self.announced = False  # the server knows the subscription on this connection
        self.silenced = False


class Transport(TcpTransport):  # type: ignore[misc]  # nats-py has no type marker
    """A socket whose end several tasks can await."""

    async def wait_closed(self) -> None:
        """Wait for the end of the socket.

        In the plain transport a reconnection that is cancelled while it waits cancels the future that all tasks wait for, and
        `close` ends as if it had been cancelled itself.
        """
        closing = asyncio.ensure_future(super().wait_closed())
        closing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its waiter may have been cancelled
        await asyncio.wait({closing}, timeout=CLOSE_S)
        if not closing.done():  # asyncio never closes a socket whose TLS handshake has failed on this side
            self._io_writer.transport.abort()
            closing.cancel()
        elif not closing.cancelled():
            closing.result()

    def __bool__(self) -> bool:
        """Return True. The client would replace a falsy transport, as the plain one is at first, by a plain one."""
        return True


class CoreClient(Client):  # type: ignore[misc]  # nats-py has no type marker
    """nats-py's client with taps and synchronous sends."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = MessageParser(self, self._on_message)
        self._transport: TcpTransport | None = None
        self.on_permission_error: Callable[[str], None] = lambda _text: None
        self.on_error: Callable[[str], None] = lambda _text: None
        self.on_restored: Callable[[], None] = lambda: None
        self.on_down: Callable[[], None] = lambda: None
        self.on_leave: Callable[[], None] = lambda: None
        self._pending: list[bytes] = []
        self.tls_only = False  # nothing is said to a server that offers no TLS
        self.up = False  # connected, and the server knows all subscriptions of this client
        self.leaving = False  # the server is being left, and others may believe for long that this client is there
        self._write_scheduled = False
        # Kept, because each look-up of the running loop costs a system call on Python 3.11.
        self._event_loop = asyncio.get_running_loop()

    # Sending:

    def send_now(self, cmd: bytes) -> bool:
        """Queue one protocol command for the end of this loop tick.

        Returns False if it was dropped: the client is not connected, or the buffer is full because the server reads too slowly.
        """
        if not self.up:
            metrics.DROPPED.labels("disconnected").inc()
            return False
        if self._pending_data_size + len(cmd) > PENDING_SIZE:
            metrics.DROPPED.labels("buffer_full").inc()
            return False
        self._pending.append(cmd)
        self._pending_data_size += len(cmd)
        if not self._write_scheduled:
            self._write_scheduled = True
            self._event_loop.call_soon(self._write_pending)
        return True

    def _write_pending(self) -> None:
        self._write_scheduled = False
        if not self._pending or not self.up:
            return
        # Every TCP transport of this client is a `Transport`. `isinstance` takes long here, because the class is abstract.
        tcp = self._transport if type(self._transport) is Transport else None
        if tcp is not None and tcp._io_writer.transport.is_closing():
            return  # the read loop is about to notice; until then nothing can be written, and what waits is dropped then
        if tcp is None or tcp._io_writer.transport.get_write_buffer_size() > 0:
            # The socket is behind (or is a WebSocket, which cannot be written to from here): the client's flusher task drains
            # it and then sends all commands that have gathered by then at once.
            if self._flush_queue.empty():
                self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
            return
        commands, self._pending, self._pending_data_size = self._pending, [], 0
        tcp.write(commands[0] if len(commands) == 1 else b"".join(commands))

    async def barrier(self, timeout_s: float) -> None:
        """Return once the server has handled all commands sent before. (The plain flush lets its PING overtake the rest.)

        Raises TimeoutError; nats.errors.Error when not connected.
        """
        if not self.up:
            raise errors.ConnectionReconnectingError
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        self.send_now(PING_PROTO)
        async with asyncio.timeout(timeout_s):
            await pong

    # Receiving:

    def tap(self, subject: str, handler: RawHandler, *, queue: str = "") -> Tap:
        """Subscribe; `handler` runs inside the read loop and must not block. Kept over reconnects."""
        self._sid += 1
        tap = Tap(self, self._sid, subject, queue, handler)
        self._subs[tap.sid] = tap
        if self.up:
            self._announce(tap)
        return tap

    def _announce(self, tap: Tap) -> None:
        tap.announced = self.send_now(command.sub_cmd(tap.subject, tap.queue, tap.sid))

    def untap(self, tap: Tap) -> None:
        """Unsubscribe and drop the tap."""
        if self._subs.pop(tap.sid, None) is not None and self.up and not tap.silenced:
            self.send_now(command.unsub_cmd(tap.sid, 0))

    def silence(self, tap: Tap, handler: RawHandler) -> None:
        """Unsubscribe, but pass messages that are already on their way to `handler`, until `untap`."""
        tap.handler = handler
        tap.silenced = True
        if self.up:
            self.send_now(command.unsub_cmd(tap.sid, 0))
        else:
            self._subs.pop(tap.sid, None)

    def _on_message(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        tap = self._subs.get(sid)
        if tap is None:
            return  # its end was on its way
        try:
            tap.handler(subject, reply, data, headers)
        except Exception as error:  # a bug in one callback must not end the read loop of all
            metrics.CALLBACK_ERRORS.inc()
            with contextlib.suppress(Exception):  # and neither must a closed log
                log.exception("callback.failed", subject=subject.decode("utf-8", "replace"), error=str(error))

    # Reconnecting:

    async def _process_err(self, err_msg: str) -> None:
        text = err_msg.strip("'")
        if "permissions violation" in text:
            self.on_permission_error(text)
        elif self.is_connecting:
            await super()._process_err(err_msg)
        else:
            self._err = errors.Error(f"nats: {text}")
            await self._error_cb(self._err)
            await self._process_op_err(self._err)

    async def _process_op_err(self, e: Exception) -> None:
        if isinstance(e, errors.StaleConnectionError) and self.is_connected and self.options["allow_reconnect"]:
            await self.leave()
            return
        await super()._process_op_err(e)
        if not self.is_connected:
            self.mark_down()

    def _connect_command(self) -> bytes:
        """Return the command that logs in. The plain client sends it in clear to a server that offers no TLS."""
        if self.tls_only and not (self._server_info.get("tls_required") or self.options["tls_handshake_first"]):
            raise errors.Error("nats: the server offers no TLS, and TLS is asked for")
        command_line: bytes = super()._connect_command()
        return command_line

    async def _connect_to_server(self, s: Any) -> None:
        trying = asyncio.current_task()
        if trying is not None and trying is self._reconnection_task and trying.cancelling():
            # A cancellation came when the attempt before had just failed, and `asyncio.wait_for` has lost it. Without this the
            # attempts would never end unless they are cancelled again: an event loop that closes waits for all of its tasks.
            raise asyncio.CancelledError
        if self._transport is None:
            self._transport = Transport()
        await super()._connect_to_server(s)

    async def force_reconnect(self) -> None:
        await super().force_reconnect()
        if not self.is_connected:
            self.mark_down()

    async def leave(self) -> None:
        """Leave a server that does not answer or cannot store for another one. `on_leave` has chosen the candidates."""
        self.on_leave()
        self.leaving = True
        try:
            await self.force_reconnect()
        finally:
            self.leaving = False
        self.cut()  # the end of a connection to a server that stands still would be waited for

    async def stop_reconnecting(self) -> None:
        """End the attempts to connect again, for good. The plain client's `close` cancels only once, and that may be lost."""
        self.options["allow_reconnect"] = False
        if self._reconnection_task is not None:
            await end_tasks([self._reconnection_task], within_s=CANCEL_S, again_s=CANCEL_AGAIN_S)

    def cut(self) -> None:
        """Close the socket at once, if there is one. Unsent data is dropped."""
        if isinstance(self._transport, Transport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()

    def mark_up(self) -> None:
        """Note that the server has all subscriptions again, except those made while the client was replaying them."""
        self.up = True
        for tap in list(self._subs.values()):
            if isinstance(tap, Tap) and not tap.announced:
                self._announce(tap)

    def mark_down(self) -> None:
        if not self.up:
            return
        self.up = False
        self._pending.clear()
        self._pending_data_size = 0
        for sid, tap in list(self._subs.items()):
            if isinstance(tap, Tap):
                tap.announced = False
                if tap.silenced:
                    del self._subs[sid]
        self.on_down()

    @property
    def info(self) -> dict[str, Any]:
        return dict(self._server_info)
