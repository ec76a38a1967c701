"""Three nats-servers as one cluster: its streams, and what becomes of requests when it loses one, or one after the other.

All tests share one cluster; each leaves it whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import TooFewServers
from headrace.jetstream.provision import ensure_topology, plan, remove_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.support.nats_cluster import SIZE, NatsCluster

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsCluster]:
    async with NatsCluster(tmp_path_factory.mktemp("cluster"), max_file_store="100TB") as running:
        yield running


async def have_copies(connection: Connection, topology: Topology, n: int) -> bool:
    """True if every stream has `n` copies that are current, the leader's included."""
    for spec in topology.all_streams():
        if spec.on_demand:
            continue
        info = await connection.api.call(f"STREAM.INFO.{spec.name}")
        if 1 + sum(peer.get("current", False) for peer in info["cluster"].get("replicas") or ()) != n:
            return False
    return True


async def until_copies(connection: Connection, topology: Topology, n: int) -> None:
    async with asyncio.timeout(60):
        while not await have_copies(connection, topology, n):
            await asyncio.sleep(0.1)


async def test_one_setting_keeps_all_streams_three_times_and_parts_without_it_leave_them_so(
    cluster: NatsCluster, subjects: Subjects
) -> None:
    options = ConnectOptions(servers=cluster.urls, replicas=SIZE)
    async with await Connection.connect(options, subjects=subjects) as connection:
        plain, threefold = Topology(subjects), Topology(subjects, replicas=options.replicas)
        await ensure_topology(connection, plain)
        assert await have_copies(connection, plain, 1)
        assert {p.action for p in await plan(connection, threefold)} == {"update"}
        await ensure_topology(connection, threefold)
        await until_copies(connection, plain, SIZE)
        await ensure_topology(connection, plain)  # a part that does not know the setting
        assert {p.action for p in await plan(connection, threefold)} == {"keep"}
        await remove_topology(connection, plain)


async def test_more_copies_than_a_cluster_has_servers_are_a_typed_error(
    cluster: NatsCluster, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.jetstream.provision.ELECTION_S", 1.0)
    async with await Connection.connect(ConnectOptions(servers=cluster.urls), subjects=subjects) as connection:
        with pytest.raises(TooFewServers, match="should have 5 copies"):
            await ensure_topology(connection, Topology(subjects, replicas=5))
        await remove_topology(connection, Topology(subjects))


async def test_copies_at_a_server_without_a_cluster_are_a_typed_error(own_server: EmbeddedServer, subjects: Subjects) -> None:
    async with await Connection.connect(ConnectOptions(servers=(own_server.url,)), subjects=subjects) as connection:
        with pytest.raises(TooFewServers, match="should have 3 copies"):
            await asyncio.wait_for(ensure_topology(connection, Topology(subjects, replicas=3)), 10)
