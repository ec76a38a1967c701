"""What the client does with commands when its socket is about to end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.jetstream.core.raw_client import CoreClient, Transport


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
