"""A port that is kept for a server that is started later."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest

from headrace.workers.reserved_port import reserve_port


async def test_a_server_can_listen_on_a_reserved_port() -> None:
    with ExitStack() as stack:
        port = reserve_port(stack, "127.0.0.1", 0)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        server.close()
        await server.wait_closed()


def test_a_port_on_which_another_listens_cannot_be_reserved() -> None:
    with ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with pytest.raises(OSError, match="in use"):
            reserve_port(stack, "127.0.0.1", taken.getsockname()[1])
