"""A real nats-server tells the path of a message: without logins, with them, and to a login that may not ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import structlog

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.logins.jwt_accounts import CREDENTIALS, operator_config
from headrace.jetstream.logins.nkey_logins import write_context
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.message_traces import Hop, ask_for_trace, read_hop
from headrace.jetstream.ports import Message
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import Topology
from tests.support.guarded_server import guarded_server
from tests.support.nats_cluster import NatsCluster

S = Subjects("hr")
POOL = "pool-a"
INGRESS, ROUTER, WORKER = Login("ingress"), Login("router"), Login("worker", POOL)
LOGINS = [Login("operator"), INGRESS, ROUTER, WORKER]
WAIT_S = 30.0


class Hops:
    """What one ingress is told."""

    def __init__(self) -> None:
        self.found: list[Hop] = []
        self._came = asyncio.Event()

    @asynccontextmanager
    async def heard_by(self, connection: Connection) -> AsyncIterator[None]:
        heard = await connection.subscribe(S.hops("i1"), self._on_message)
        await connection.barrier()
        yield
        await heard.unsubscribe()

    def _on_message(self, message: Message) -> None:
        hop = read_hop(message.data)
        assert hop is not None, message.data
        self.found.append(hop)
        self._came.set()

    async def of(self, message_id: str) -> list[Hop]:
        """Wait until the server of the sender and the one that stored the message have told; they may be one."""
        async with asyncio.timeout(WAIT_S):
            while not self._whole(found := [hop for hop in self.found if hop.message == message_id]):
                self._came.clear()
                await self._came.wait()
        return found

    def _whole(self, found: list[Hop]) -> bool:
        return any(not hop.place for hop in found) and any(hop.stream for hop in found)


async def store(connection: Connection, subject: str, message_id: str) -> int:
    headers = ask_for_trace(S.hops("i1"))
    return (await connection.publish(subject, b"x", headers=headers, msg_id=message_id, timeout_s=WAIT_S)).seq


async def publish_as_all(hops: Hops, ingress: Connection, router: Connection, worker: Connection, account: str) -> None:
    """Store a request, place it twice and move it; each time its account and its stream must be told."""
    async with hops.heard_by(ingress):
        for number, (connection, subject, stream) in enumerate(
            (
                (ingress, S.req(POOL, "std"), "HR_REQ"),
                (router, S.work(POOL, "w1"), "HR_WORK"),
                (worker, S.work(POOL, "w2"), "HR_WORK"),
                (worker, S.req(POOL, "re"), "HR_MOVED"),
            )
        ):
            assert await store(connection, subject, f"r.{number}") > 0
            (hop,) = await hops.of(f"r.{number}")
            assert (hop.subject, hop.account, hop.stream, hop.place, hop.error) == (subject, account, stream, "", "")
            assert 0 < hop.came_s <= hop.went_s


async def test_each_stored_message_is_told_with_its_stream(own_server: EmbeddedServer) -> None:
    options = ConnectOptions(servers=(own_server.url,))
    async with await Connection.connect(options, subjects=S) as one:
        await ensure_topology(one, Topology(S))
        await publish_as_all(Hops(), one, one, one, "$G")


async def test_it_is_told_up_to_the_stream_where_parts_log_in(tmp_path: Path) -> None:
    async with guarded_server(tmp_path, LOGINS) as guarded:
        parts = [await guarded.as_(login) for login in (INGRESS, ROUTER, WORKER)]
        await publish_as_all(Hops(), *parts, "HR_PARTS")
        for part in parts:
            await part.close()
        assert "Violation" not in guarded.server.log_file.read_text()


async def test_it_is_told_where_the_server_reads_tokens(tmp_path: Path) -> None:
    folder, topology = tmp_path / "logins", Topology(S)
    with EmbeddedServer(tmp_path / "nats", ServerSettings(extra=operator_config(topology, folder, LOGINS))) as server:
        contexts = [
            write_context(folder, one, url=server.url, prefix="hr", credentials=one.name + CREDENTIALS) for one in LOGINS
        ]
        parts = [await Connection.connect(ConnectOptions.from_context(str(path)), subjects=S) for path in contexts]
        async with TaskScope():
            await ensure_topology(parts[0], topology)
            hops = Hops()
            async with hops.heard_by(parts[1]):
                assert await store(parts[1], S.req(POOL, "std"), "r.1") == 1
                (hop,) = await hops.of("r.1")
                assert hop.stream == "HR_REQ"
        for part in parts:
            await part.close()


def without_hops(config: str) -> str:
    return config.replace('          "hr.hops.*"\n', "")


async def test_a_login_that_may_not_ask_stores_its_messages_all_the_same_and_says_so_once(tmp_path: Path) -> None:
    async with guarded_server(tmp_path, LOGINS, edited=without_hops) as guarded:
        router = await guarded.as_(ROUTER)
        with structlog.testing.capture_logs() as logs:
            seqs = await asyncio.gather(*(store(router, S.work(POOL, f"w{n}"), f"r.{n}") for n in range(8)))
            seqs.append(await store(router, S.work(POOL, "w9"), "r.9"))
        await router.close()
        assert sorted(seqs) == list(range(1, 10))
        denied = [line for line in logs if line["event"] == "traces.denied"]
        assert 1 <= len(denied) <= 8  # one for each that was under way; none asks again
        assert (await guarded.operator.stream_state("HR_WORK")).messages == 9


async def path_of_one_try(hops: Hops, one: Connection, name: str) -> list[Hop]:
    """Store messages until one was stored at once. A busy cluster is sent a message again, and each try has its hops."""
    for attempt in range(10):
        await store(one, S.req(POOL, "std"), f"{name}.{attempt}")
        path = await hops.of(f"{name}.{attempt}")
        if len(path) <= 2:
            break
    return path


async def until_all_reach(one: Connection, others: list[Connection]) -> None:
    """Wait until the servers of the others know what `one` subscribes to: until then they drop what they tell of a message."""
    reached: set[bytes] = set()
    heard = await one.subscribe("probe", lambda message: reached.add(message.data))
    async with asyncio.timeout(WAIT_S):
        while len(reached) < len(others):
            for number, other in enumerate(others):
                other.send("probe", b"%d" % number)
            await asyncio.sleep(0.02)
    await heard.unsubscribe()


@pytest.mark.timeout(120)
async def test_a_message_that_another_server_of_a_cluster_stores_has_a_hop_at_both(tmp_path: Path) -> None:
    async with NatsCluster(tmp_path) as cluster, AsyncExitStack() as stack:
        urls = [server.url for server in cluster.servers]
        made = []
        for url in urls:
            connecting = Connection.connect(ConnectOptions(servers=(url,), replicas=1), subjects=S)
            made.append(await stack.enter_async_context(await connecting))
        await ensure_topology(made[0], Topology(S))
        hops = Hops()
        async with hops.heard_by(made[0]):
            await until_all_reach(made[0], made[1:])
            paths = [await path_of_one_try(hops, one, f"r.{number}") for number, one in enumerate(made)]
        assert sorted(map(len, paths)) == [1, 2, 2]  # one is connected to the leader of the stream
        for path in paths:
            assert [hop.stream for hop in path].count("HR_REQ") == 1
            assert sorted(hop.place for hop in path) == ["", "1"][: len(path)]
