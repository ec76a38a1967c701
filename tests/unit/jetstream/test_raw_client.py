"""What the parser of a connection makes of the bytes of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.raw_client import CoreClient, MessageParser, Parser, Transport, errors

Heard = list[tuple[Any, ...]]


class Client:
    """Notes what the parser hands over; the plain parser calls all of it, ours all but `_process_msg`."""

    def __init__(self) -> None:
        self.heard: Heard = []
        self.on_error: Any = lambda: None

    async def _process_msg(self, *message: Any) -> None:
        self.heard.append(message)

    def on_message(self, *message: Any) -> None:
        self.heard.append(message)

    async def _process_err(self, text: str) -> None:
        self.heard.append(("err", text))
        self.on_error()

    async def _process_ping(self) -> None:
        self.heard.append(("ping",))

    async def _process_pong(self) -> None:
        self.heard.append(("pong",))

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.heard.append(("info", info))


def ours() -> tuple[MessageParser, Client]:
    client = Client()
    return MessageParser(client, client.on_message), client


def heard(parser: Any, client: Client, reads: Sequence[bytes]) -> Heard:
    async def feed() -> None:
        for data in reads:
            await parser.parse(data)

    asyncio.run(feed())
    return client.heard


WORDS = st.from_regex(rb"[A-Za-z0-9_.$*-]{1,12}", fullmatch=True)
PAYLOADS = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\r\n", b"MSG a 1 3\r\nxyz\r\n", b"PING\r\n"]))
CONTROL = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Slow Consumer'\r\n", b'INFO {"port": 4222}\r\n'])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    subject, reply, data = draw(WORDS), draw(st.one_of(st.just(b""), WORDS)), draw(PAYLOADS)
    head = b" ".join(word for word in (subject, b"%d" % draw(st.integers(0, 999)), reply) if word)
    if not draw(st.booleans()):
        return b"MSG %b %d\r\n%b\r\n" % (head, len(data), data)
    block = b"NATS/1.0\r\nA: b\r\n\r\n"
    return b"HMSG %b %d %d\r\n%b%b\r\n" % (head, len(block), len(block) + len(data), block, data)


@given(st.lists(st.one_of(messages(), CONTROL), max_size=8), st.lists(st.integers(0, 400), max_size=6))
def test_reads_of_any_size_give_what_the_plain_parser_gives(lines: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(lines)
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    reads = [sent[begin:end] for begin, end in pairwise(places)]
    plain = Client()
    assert heard(*ours(), reads) == heard(Parser(plain), plain, [sent])


def test_a_large_message_is_not_put_together_before_it_is_whole() -> None:
    parser, client = ours()
    data = bytes(1 << 20)
    reads = [b"MSG a.b 7 %d\r\n" % len(data), *(data[at : at + 32768] for at in range(0, len(data), 32768))]

    async def feed() -> None:
        for read in reads:
            await parser.parse(read)
            assert not client.heard
        assert len(parser._parts) == len(reads)  # not joined at each read
        await parser.parse(b"\r\nPING\r\n")

    asyncio.run(feed())
    assert client.heard == [(7, b"a.b", b"", data, None), ("ping",)]


@pytest.mark.parametrize(
    "line",
    [
        *(b"MSG a 1\r\n", b"MSG a x 1\r\n", b"MSG a 1 -3\r\n", b"MSG\r\n", b"MSGX a 1 2\r\n", b"MSG a 1 r r 2\r\n"),
        *(b"HMSG a 1 9 5\r\n", b"HMSG a 1 -1 5\r\n", b"HMSG a 1\r\n", b"HELLO\r\n", b"\r\n", b"x" * 5000 + b"\r\n"),
    ],
)
def test_a_line_that_is_none_of_the_protocol_is_an_error(line: bytes) -> None:
    with pytest.raises(errors.ProtocolError):
        heard(*ours(), [line])


def test_nothing_of_a_connection_that_has_ended_is_parsed_with_the_next_one() -> None:
    parser, client = ours()
    client.on_error = parser.reset  # as a reconnection does
    reads = [b"MSG a 1 4\r\nha", b"lf\r\n-ERR 'Stale Connection'\r\nMSG b 1 2\r\nxy\r\nMSG c 1 5\r\nab"]
    assert heard(parser, client, reads) == [(1, b"a", b"", b"half", None), ("err", "'stale connection'")]
    client.heard.clear()
    assert heard(parser, client, [b"MSG d 1 1\r\nz\r\n"]) == [(1, b"d", b"", b"z", None)]


class Socket:
    """The writer of a connection and its transport in one."""

    def __init__(self) -> None:
        self.closing = False
        self.written: list[bytes] = []
        self.transport = self

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        if self.closing:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
        self.written.append(data)


@pytest.mark.parametrize("closing", [False, True])
async def test_nothing_is_written_to_a_socket_that_is_closing(closing: bool) -> None:
    """The read loop has not noticed yet; what is queued is dropped when it does."""
    troubles: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: troubles.append(context))
    socket = Socket()
    transport = Transport()
    transport._io_writer = socket
    client = CoreClient()
    client._transport = transport
    client.up = True
    socket.closing = closing
    assert client.send_now(b"PING\r\n")
    await asyncio.sleep(0.01)
    assert socket.written == ([] if closing else [b"PING\r\n"])
    assert troubles == []
    client.mark_down()
    assert client._pending == []


async def test_commands_for_another_transport_than_a_socket_are_left_to_the_flusher() -> None:
    """As on a WebSocket, which has no socket to write to from a callback."""
    client = CoreClient()
    client._transport = object()
    client._flush_queue = asyncio.Queue()
    client.up = True
    assert client.send_now(b"PING\r\n")
    await asyncio.sleep(0.01)
    assert (client._pending, client._flush_queue.qsize()) == ([b"PING\r\n"], 1)
