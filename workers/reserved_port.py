"""Reserves a TCP port for a server that an engine starts later: a bound socket keeps it from other processes until then."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def reserve_port(stack: ExitStack, host: str, port: int) -> int:
    """Bind a port until `stack` is closed, 0 = any free one, and return it. Raises OSError, OverflowError.

    A process that allows the reuse of addresses can listen on it all the same: this socket does so, too, and never listens.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = stack.enter_context(socket.socket(family, kind))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(address)
    return int(held.getsockname()[1])
