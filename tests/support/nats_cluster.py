"""Three nats-servers on loopback that are one JetStream cluster, to be killed, frozen, replaced and cut off.

The first one reaches the others only over a link that can be cut while all its clients stay, as a partition that leaves a
minority with clients. The others have no other way to it either: they ask for a route at that link, and what it would learn of
them by gossip is an address where nobody listens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import urllib.request
from pathlib import Path
from typing import Any, Self

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.settings import ServerSettings
from headrace.tools.chaos.client import NetworkProxy
from headrace.up.parts import choose_port

NOBODY, NOWHERE = "127.0.0.1:1", "127.0.0.1:2"
START_S = 60.0
LAME_DUCK_S = 60.0
SIZE = 3


class NatsCluster:
    """Enter it to run the servers. Clients without a login share one account."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.data_dir = folder
        self._settings = settings
        self._links: list[NetworkProxy] = []
        self.servers: list[EmbeddedServer] = []
        # An address of its own: while a server is down nobody else is given its ports there, as connections to and from
        # 127.0.0.1 would be.
        self.host = "127." + ".".join(str(random.randint(2, 254)) for _ in range(3))

    async def __aenter__(self) -> Self:
        await self.start_async()
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.stop_async()

    async def start_async(self) -> None:
        host = self.host
        ports = [choose_port(host, 0) for _ in range(SIZE)]
        self._links = [await NetworkProxy(host, ports[0]).__aenter__()]
        first = self._links[0].url.removeprefix("nats://")
        second, third = (f"{host}:{port}" for port in ports[1:])
        # All three list three, because each counts its own list to know how many there will be.
        own = f"{host}:{ports[0]}"
        routes = [
            (first, [own, NOBODY, NOWHERE]),
            (NOBODY, [first, second, NOWHERE]),
            (NOBODY, [first, second, third]),
        ]
        self.servers = [
            EmbeddedServer(
                self.folder / f"n{n}",
                ServerSettings(
                    host=host,
                    monitoring_host=host,
                    extra=_extra(n, f"{host}:{ports[n - 1]}", advertise, others),
                    processors=1,
                    **self._settings,
                ),
                port=choose_port(host, 0),
            )
            for n, (advertise, others) in enumerate(routes, 1)
        ]
        await asyncio.gather(*(server.start_async(timeout_s=START_S) for server in self.servers))

    async def stop_async(self) -> None:
        for server in self.servers:
            server.resume()
        # All at once, and without a clean end: nobody is there to take what a server hands over.
        await asyncio.gather(*(asyncio.to_thread(server.kill) for server in self.servers))
        for link in self._links:
            await link.__aexit__()

    @property
    def url(self) -> str:
        """All addresses, as the setting takes them."""
        return ",".join(server.url for server in self.servers)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self.servers)

    def named(self, name: str) -> EmbeddedServer:
        """Return the server `n1`, `n2` or `n3`."""
        return self.servers[int(name.removeprefix("n")) - 1]

    def cut_off_first(self) -> None:
        """Cut the first server off the others. Its clients stay connected to it."""
        self._links[0].cut()

    def mend(self) -> None:
        self._links[0].mend()

    async def leader(self, stream: str = "") -> str:
        """Return the name of the server that leads a stream, or all of JetStream; "" without one."""
        for server in self.servers:
            if server.running and (told := await asyncio.to_thread(_jsz, server)) is not None:
                found = leader_of(told, stream)
                if found:
                    return found
        return ""

    async def replace_in_lame_duck_mode(self, server: EmbeddedServer) -> None:
        """End a server as an operator does who replaces it, and start it again. Returns once it is current."""
        process = server._process
        assert process is not None
        os.kill(process.pid, signal.SIGUSR2)
        async with asyncio.timeout(LAME_DUCK_S):
            while server.running:
                await asyncio.sleep(0.05)
        await server.start_async(timeout_s=START_S)


def _extra(n: int, listen: str, advertise: str, routes: list[str]) -> str:
    lines = [
        f"server_name: n{n}",
        "lame_duck_duration: 30s",  # the shortest that there is; the rest of it is used by clients that are closed one by one
        "lame_duck_grace_period: 1s",
        'write_deadline: "1s"',  # while a route is stuck in a partition, the server that writes to it handles nothing else
        "cluster {",
        "  name: headrace",
        f'  listen: "{listen}"',
        f'  advertise: "{advertise}"',
        f"  routes: {json.dumps([f'nats-route://{route}' for route in routes])}",
        "  connect_retries: 1000000",
        "  no_advertise: true",
        "}",
        "accounts {",
        "  HR { jetstream: enabled, users: [{user: anybody, password: anybody}] }",
        "}",
        "no_auth_user: anybody",
    ]
    return "\n".join(lines)


def _jsz(server: EmbeddedServer) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{server.monitoring_url}/jsz?streams=true", timeout=1.0) as answer:
            told: dict[str, Any] = json.load(answer)
    except (OSError, ValueError):
        return None
    return told


def leader_of(told: dict[str, Any], stream: str) -> str:
    """Return the leader of a stream, of JetStream itself for "", by what `/jsz` told; "" where there is none."""
    if not stream:
        return str((told.get("meta_cluster") or {}).get("leader") or "")
    for account in told.get("account_details") or ():
        for detail in account.get("stream_detail") or ():
            if detail["name"] == stream:
                return str((detail.get("cluster") or {}).get("leader") or "")
    return ""


async def starve(server: EmbeddedServer, *, times: int) -> None:
    """Have a server stand still half of the time, as one does that gets too little of a processor."""
    try:
        for _ in range(times):
            server.pause()
            await asyncio.sleep(0.2)
            server.resume()
            await asyncio.sleep(0.2)
    finally:
        server.resume()
