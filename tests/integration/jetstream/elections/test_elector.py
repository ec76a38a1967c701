"""An elector at three nats-servers: a leader that dies is followed at once, one that lives is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.core.api import ApiError
from headrace.jetstream.elections.elector import OUTAGE_S, Elector
from headrace.jetstream.elections.raft_groups import RaftGroup
from headrace.jetstream.errors import AccessDenied, JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.proxy import NetworkProxy
from tests.support.nats_cluster import SIZE, START_S, SYSTEM, NatsCluster, starve

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
STREAM = "LED"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsCluster]:
    async with NatsCluster(tmp_path_factory.mktemp("cluster")) as running:
        async with await Connection.connect(ConnectOptions(servers=running.urls), subjects=Subjects("hr")) as connection:
            body = {"name": STREAM, "subjects": ["led.>"], "num_replicas": SIZE, "storage": "file"}
            async with asyncio.timeout(60):
                while True:  # all of JetStream has a leader a moment before it makes streams
                    try:
                        await connection.api.call(f"STREAM.CREATE.{STREAM}", body)
                        break
                    except (ApiError, JetStreamError):
                        await asyncio.sleep(0.2)
        yield running


def system(cluster: NatsCluster, *servers: str) -> ConnectOptions:
    return ConnectOptions(servers=servers or cluster.urls, **SYSTEM)


class Watched:
    """An elector that runs while the context is open, and what it sees of the stream."""

    def __init__(self, options: ConnectOptions) -> None:
        self.elector = Elector(options)

    async def __aenter__(self) -> Watched:
        ready = asyncio.Event()
        self._task = asyncio.create_task(self.elector.run(ready))
        await asyncio.wait_for(ready.wait(), 30)
        async with asyncio.timeout(30):
            while len(self.elector.servers) < SIZE:
                await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def views(self) -> list[RaftGroup]:
        """The group of the stream, as each server sees it."""
        answers = await self.elector.groups()
        return [group for groups in answers.values() for name, group in groups.items() if name.startswith("S-")]

    async def led(self) -> RaftGroup:
        """Wait until all that answer know the leader, and return what it says."""
        async with asyncio.timeout(60):
            while True:
                views = await self.views()
                leading = [view for view in views if view.state == "LEADER"]
                if len(leading) == 1 and len(views) > 1 and all(view.leader and view.term == leading[0].term for view in views):
                    return leading[0]
                await asyncio.sleep(0.05)


async def test_the_followers_of_a_leader_that_dies_are_called_and_do_not_wait_for_their_timers(cluster: NatsCluster) -> None:
    """An election that the call began is two terms later: the first is that of the call, in which nobody is elected."""
    async with Watched(system(cluster)) as watched:
        before = await watched.led()
        server = cluster.named(await cluster.leader(STREAM))
        with capture_logs() as logs:
            server.kill()
            began = time.monotonic()
            async with asyncio.timeout(60):
                while not any(entry["event"] == "elector.called" for entry in logs):
                    await asyncio.sleep(0.02)
            called = time.monotonic() - began
            after = await watched.led()
        print(f"called after {called:.2f} s, another leader is known after {time.monotonic() - began:.2f} s")
        assert after.term >= before.term + 2
        assert logs[0]["gone"] == [f"n{cluster.servers.index(server) + 1}"]
        await server.start_async(timeout_s=START_S)
        async with asyncio.timeout(60):
            while len(watched.elector.servers) < SIZE:
                await asyncio.sleep(0.05)


async def test_a_server_that_only_the_elector_does_not_reach_goes_on_leading(cluster: NatsCluster) -> None:
    leader = cluster.named(await cluster.leader(STREAM))
    async with NetworkProxy(leader.settings.host, leader.port) as link:
        others = [server.url for server in cluster.servers if server is not leader]
        async with Watched(system(cluster, link.url, *others)) as watched:
            before = await watched.led()
            link.cut()
            async with asyncio.timeout(30):
                while len(watched.elector.servers) == SIZE:
                    await asyncio.sleep(0.05)
            with capture_logs() as logs:
                await asyncio.sleep(2)  # some looks at the groups
            assert not [entry for entry in logs if entry["event"] == "elector.called"]
            assert (await watched.led()).term == before.term
            assert OUTAGE_S > 2, "it would not have looked"


async def test_an_elector_that_stood_still_itself_and_servers_that_are_only_slow_are_no_reason_to_elect(
    cluster: NatsCluster,
) -> None:
    async with Watched(system(cluster)) as watched:
        before = await watched.led()
        server = cluster.named(await cluster.leader(STREAM))
        with capture_logs() as logs:
            for _ in range(3):
                time.sleep(1.2)  # the elector is what stands still
                await asyncio.sleep(0.5)
            await starve(server, times=8)
        assert not [entry for entry in logs if entry["event"] == "elector.called"]
        assert (await watched.led()).term == before.term


async def test_a_server_that_is_cut_off_and_keeps_its_clients_is_followed_by_another(cluster: NatsCluster) -> None:
    async with Watched(system(cluster)) as watched:
        async with await Connection.connect(ConnectOptions(servers=cluster.urls), subjects=Subjects("hr")) as connection:
            async with asyncio.timeout(60):
                while await cluster.leader(STREAM) != "n1":
                    with contextlib.suppress(ApiError, JetStreamError):
                        await connection.api.call(f"STREAM.LEADER.STEPDOWN.{STREAM}", {"placement": {"preferred": "n1"}})
                    await asyncio.sleep(0.5)
        before = await watched.led()
        with capture_logs() as logs:
            cluster.cut_off_first()
            try:
                async with asyncio.timeout(60):
                    while not any(entry["event"] == "elector.called" for entry in logs):
                        await asyncio.sleep(0.02)
                after = await watched.led()
            finally:
                cluster.mend()
        assert after.term >= before.term + 2
        assert next(entry for entry in logs if entry["event"] == "elector.called")["gone"] == ["n1"]
        async with asyncio.timeout(60):
            while len(await watched.views()) < SIZE:
                await asyncio.sleep(0.1)


async def test_a_login_outside_the_system_account_is_refused_with_the_reason(
    cluster: NatsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.jetstream.elections.elector.TOLD_S", 1.0)
    with pytest.raises(AccessDenied, match="system account"):
        await asyncio.wait_for(Elector(ConnectOptions(servers=cluster.urls)).run(), 30)


async def test_the_command_says_what_it_watches_and_ends_at_a_signal(cluster: NatsCluster) -> None:
    environment = {
        "PATH": "",
        "PYTHONPATH": ":".join(sys.path),
        "HEADRACE_NATS_URL": cluster.url,
        "HEADRACE_NATS_USER": SYSTEM["user"],
        "HEADRACE_NATS_PASSWORD": SYSTEM["password"],
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace", "elector", stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        said = await asyncio.wait_for(process.stdout.readline(), 60)
        assert said.startswith(b"watches n")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
