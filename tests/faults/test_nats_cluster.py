"""Three nats-servers as one cluster: its streams, and what becomes of requests when it loses one, or one after the other.

All tests share one cluster; each leaves it whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from headrace.doctor import check_server
from headrace.doctor_facts import read_server
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import TooFewServers
from headrace.jetstream.provision import bucket_copies, ensure_topology, plan, remove_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.faults.support.cluster_scene import AT_FIRST, Load, at_cluster, clients_at
from tests.faults.support.scene import NAMES, Scene
from tests.support.nats_cluster import SIZE, START_S, NatsCluster, starve

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsCluster]:
    async with NatsCluster(tmp_path_factory.mktemp("cluster"), max_file_store="100TB") as running:
        yield running


async def have_copies(connection: Connection, topology: Topology, n: int) -> bool:
    """True if every stream and every consumer has `n` copies that are current, the leader's included."""
    for spec in topology.all_streams():
        if spec.on_demand:
            continue
        info = await connection.api.call(f"STREAM.INFO.{spec.name}")
        consumers = await connection.api.call(f"CONSUMER.LIST.{spec.name}")
        for one in (info, *(c for c in consumers.get("consumers") or () if c["config"].get("durable_name"))):
            cluster = one.get("cluster") or {}
            if not cluster.get("leader") or 1 + sum(p.get("current", False) for p in cluster.get("replicas") or ()) != n:
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
        assert await bucket_copies(connection, subjects.bucket("members")) == 1
        assert {p.action for p in await plan(connection, threefold)} == {"update"}
        await ensure_topology(connection, threefold)
        await until_copies(connection, plain, SIZE)
        assert await bucket_copies(connection, subjects.bucket("members")) == SIZE
        await ensure_topology(connection, plain)  # a part that does not know the setting
        assert {p.action for p in await plan(connection, threefold)} == {"keep"}
        await remove_topology(connection, plain)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(cluster: NatsCluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with at_cluster(tmp_path_factory.mktemp("deployment"), cluster) as running:
        yield running


async def test_a_running_deployment_gets_three_copies_of_everything_and_loses_nothing(
    cluster: NatsCluster, scene: Scene
) -> None:
    """A stream that gets more copies confirms nothing for some seconds: new requests are refused then, as in an election."""
    load = Load(scene, tokens=100)
    await load.began()
    told = await scene.command("streams", "apply", "--nats-replicas", str(SIZE))
    assert "num_replicas: 1 → 3" in told
    await until_copies(scene.connection, Topology(NAMES), SIZE)
    await load.end()
    facts = await read_server(scene.connection, Topology(NAMES), monitoring_url=None)
    assert {c.copies for s in facts.streams for c in s.consumers} == {0, SIZE}, "those of readers end with them"
    found = [f for f in check_server(facts) if f.check in ("server.replication", "server.peers") and f.level != "ok"]
    assert not found


async def given_copies(scene: Scene) -> None:
    """Every stream has its three copies, also where this test is the first one of its file."""
    await scene.command("streams", "apply", "--nats-replicas", str(SIZE))
    await until_copies(scene.connection, Topology(NAMES), SIZE)


async def started_with_copies(scene: Scene) -> None:
    """All parts have been started since leases have copies, so that theirs outlast an election."""
    await given_copies(scene)
    for process in scene.deployment.processes:
        scene.deployment.kill(process)
    await asyncio.sleep(0.5)
    await scene.well()
    await until_copies(scene.connection, Topology(NAMES), SIZE)


def lapsed(scene: Scene) -> list[str]:
    """What the parts have logged of leases that they lost, but for the one of making snapshots, which may change hands."""
    lines = [line for process in scene.deployment.processes for line in scene.log(process.name).splitlines()]
    return [line for line in lines if "lease.lapsed" in line and "snapshots." not in line]


@pytest.mark.parametrize("stream", ["KV_hr_members", "HR_REQ"])
async def test_the_death_of_the_servers_that_lead_loses_and_repeats_and_refuses_nothing(
    cluster: NatsCluster, scene: Scene, stream: str
) -> None:
    """One leads the leases of everybody, one the new requests; the other streams may be led by it or by another.

    Nobody's lease lapses meanwhile, so that streams go on during the election, and new requests wait for it.
    """
    await started_with_copies(scene)
    before = lapsed(scene)
    load = Load(scene, tokens=300)
    await load.began()
    server = cluster.named(await cluster.leader(stream))
    server.kill()
    await asyncio.sleep(10)
    await server.start_async(timeout_s=START_S)
    await load.end()
    assert lapsed(scene) == before
    assert load.refused == 0
    await until_copies(scene.connection, Topology(NAMES), SIZE)


async def test_clients_of_a_server_in_the_minority_go_to_the_others(cluster: NatsCluster, scene: Scene) -> None:
    await given_copies(scene)
    cut_off = cluster.servers[0]
    for name in AT_FIRST:  # where they were sent by what came before
        scene.deployment.kill(scene.process(name))
    await asyncio.sleep(0.5)
    await scene.well()
    assert clients_at(cut_off), "nobody to be cut off"
    load = Load(scene, tokens=300)
    await load.began()
    cluster.cut_off_first()
    await scene.until("everybody else has left", lambda: set(clients_at(cut_off)) <= {"None"}, 30)
    await asyncio.sleep(8)
    cluster.mend()
    await load.end()
    await until_copies(scene.connection, Topology(NAMES), SIZE)


async def test_clients_leave_a_server_that_stands_still(cluster: NatsCluster, subjects: Subjects) -> None:
    async with await Connection.connect(ConnectOptions(servers=cluster.urls), subjects=subjects) as connection:
        name = connection.core.info["server_name"]
        server = cluster.named(name)
        server.pause()
        try:
            async with asyncio.timeout(30):
                while not connection.connected or connection.core.info["server_name"] == name:
                    await asyncio.sleep(0.1)
            await connection.barrier()
        finally:
            server.resume()


async def test_a_server_that_is_only_slow_is_not_left_nor_by_a_client_that_stands_still_itself(
    cluster: NatsCluster, subjects: Subjects
) -> None:
    """A server without enough of a processor answers late, again and again, and so does each with a client that is busy."""
    with capture_logs() as logs:
        async with await Connection.connect(ConnectOptions(servers=cluster.urls), subjects=subjects) as connection:
            name = connection.core.info["server_name"]
            server = cluster.named(name)
            await starve(server, times=12)
            for _ in range(3):
                time.sleep(1.2)  # the client is what stands still
                await asyncio.sleep(0.5)
            here = connection.core.info["server_name"]
    assert not [entry for entry in logs if entry["event"] == "connection.moved"]
    assert here == name


async def test_replacing_one_server_after_the_other_is_not_noticed(cluster: NatsCluster, scene: Scene) -> None:
    load = Load(scene, tokens=500)
    await load.began()
    for server in cluster.servers:
        await until_copies(scene.connection, Topology(NAMES), SIZE)
        await cluster.replace_in_lame_duck_mode(server)
    await load.end()


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
