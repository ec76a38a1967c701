"""Finds the address from which this machine reaches its NATS server, and so where others reach this machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from headrace.jetstream.errors import ServerUnreachable

DEFAULT_PORT = 4222


async def address_of_route(servers: Sequence[str]) -> str:
    """Return the local address of the route to the first server that there is a route to. Nothing is sent.

    Raises ServerUnreachable if there is none.
    """
    loop = asyncio.get_running_loop()
    why: list[str] = []
    for server in servers:
        url = urlsplit(server if "://" in server else f"nats://{server}")
        try:
            found = await loop.getaddrinfo(url.hostname, url.port or DEFAULT_PORT, type=socket.SOCK_DGRAM)
        except (OSError, ValueError) as error:
            why.append(f"{server}: {error}")
            continue
        for family, kind, protocol, _, address in found:
            with suppress(OSError), socket.socket(family, kind, protocol) as route:
                route.connect(address)  # of a datagram socket: this asks the routing table and sends nothing
                return str(route.getsockname()[0])
        why.append(f"{server}: no route to it")
    raise ServerUnreachable(f"this machine has no address towards its NATS server: {'; '.join(why)}")
