"""Two clusters of NATS servers that are joined by gateways, as of two regions: one deployment over both."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.up.parts import choose_port
from tests.integration.jetstream.regions import serves_as_one

pytestmark = pytest.mark.timeout(180)

NAMES = Subjects("hr")
HOST = "127.0.0.1"
CLUSTER_OF = {"e1": "east", "e2": "east", "w1": "west"}
START_S = 90.0


def _configuration(name: str, routes: dict[str, int], gateways: dict[str, int]) -> str:
    cluster = CLUSTER_OF[name]
    routed = [f"nats-route://{HOST}:{port}" for other, port in routes.items() if CLUSTER_OF[other] == cluster]
    remotes = [
        {"name": other, "urls": [f"nats://{HOST}:{gateways[n]}" for n, c in CLUSTER_OF.items() if c == other]}
        for other in sorted(set(CLUSTER_OF.values()))
    ]
    return "\n".join(
        (
            f"server_name: {name}",
            "cluster {",
            f"  name: {cluster}",
            f'  listen: "{HOST}:{routes[name]}"',
            f"  routes: {json.dumps(routed)}",
            "}",
            "gateway {",
            f"  name: {cluster}",
            f'  listen: "{HOST}:{gateways[name]}"',
            f"  gateways: {json.dumps(remotes)}",
            "}",
        )
    )


@asynccontextmanager
async def supercluster(folder: Path) -> AsyncIterator[tuple[EmbeddedServer, EmbeddedServer]]:
    """A server of the cluster with two, and the one of the cluster with one. All three are one JetStream."""
    routes = {name: choose_port(HOST, 0) for name in CLUSTER_OF}
    gateways = {name: choose_port(HOST, 0) for name in CLUSTER_OF}
    servers = {
        name: EmbeddedServer(
            folder / name,
            ServerSettings(extra=_configuration(name, routes, gateways), processors=1, max_file_store="100TB"),
            port=choose_port(HOST, 0),
        )
        for name in CLUSTER_OF
    }
    async with contextlib.AsyncExitStack() as stack:
        for server in servers.values():
            stack.callback(server.kill)
        await asyncio.gather(*(server.start_async(timeout_s=START_S) for server in servers.values()))
        yield servers["e1"], servers["w1"]


async def led_from(connection: Connection, stream: str) -> str:
    """The cluster that keeps a stream."""
    info = await connection.api.call(f"STREAM.INFO.{stream}")
    return str(info["cluster"]["name"])


async def test_one_deployment_spans_two_clusters_and_keeps_its_streams_where_they_were_made(tmp_path: Path) -> None:
    """Each call of the region without streams crosses the gateway; leases, queues and core messages all pass."""
    async with (
        supercluster(tmp_path) as (east, west),
        await Connection.connect(ConnectOptions(servers=(east.url,)), subjects=NAMES) as near,
        await Connection.connect(ConnectOptions(servers=(west.url,)), subjects=NAMES) as far,
    ):
        await ensure_topology(near, Topology(NAMES))
        await ensure_topology(far, Topology(NAMES))  # a part of the other region finds them
        names = [spec.name for spec in Topology(NAMES).all_streams() if not spec.on_demand]
        assert {await led_from(far, name) for name in names} == {"east"}
        await serves_as_one(near, far, NAMES)
