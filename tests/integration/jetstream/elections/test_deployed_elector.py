"""The electors of `deploy/`, started as there, at servers that are configured as there: a killed leader is followed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.doctor.server_facts import read_monitoring
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.core.api import ApiError
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.up.frontend_probe import choose_port
from tests.support.deployed_cluster import DeployedCluster
from tests.support.deployed_files import NATS_CHART, elector_of, manifests, whole_chart
from tests.support.kubernetes_objects import needs_tools

pytestmark = [pytest.mark.timeout(240), needs_tools]
NAMES = Subjects("hr")
NO_LOGIN = ConnectOptions()
WAIT_S = 90
needs_nats_chart = pytest.mark.skipif(not NATS_CHART, reason="HEADRACE_NATS_CHART names no folder with NATS' chart")


SYSTEMD = Path(__file__).parents[4] / "deploy" / "systemd"


def deployed(name: str) -> tuple[str, dict[str, Any]]:
    """The configuration of nats-server, and the container of the electors."""
    if name == "manifests":
        config = next(each for each in manifests("nats.yaml") if each["kind"] == "ConfigMap")["data"]["nats-server.conf"]
        container = elector_of(manifests("aggregated.yaml"))
    else:
        objects, config, _ = whole_chart({}, real=name == "chart with that of NATS")
        container = elector_of(objects)
    assert container is not None
    return config, container


@contextlib.asynccontextmanager
async def running(container: dict[str, Any], urls: tuple[str, ...], log: Path) -> AsyncIterator[str]:
    """An elector with the command line and the variables of its container, once it is ready; the address of its page."""
    own = {one["name"]: one["value"] for one in container["env"]}
    assert len(own["HEADRACE_NATS_URL"].split(",")) == len(urls)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path), **own, "HEADRACE_NATS_URL": ",".join(urls)}
    port = choose_port("127.0.0.1", 0)
    words = [*container["args"], "--elector-metrics-host", "127.0.0.1", "--elector-metrics-port", str(port)]
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "headrace", *words, stdout=file, stderr=file, env=environment
        )
    try:
        page = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(WAIT_S):
            while '"healthy"' not in await asyncio.to_thread(get, f"{page}/health"):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.1)
        yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


async def provisioned(cluster: DeployedCluster, login: ConnectOptions = NO_LOGIN) -> Connection:
    """A connection, once the streams of a deployment are there with three copies each."""
    options, connection = dataclasses.replace(login, servers=cluster.urls), None
    async with asyncio.timeout(WAIT_S):
        while True:  # all of JetStream has a leader a moment before it answers and makes streams
            try:
                connection = connection or await Connection.connect(options, subjects=NAMES)
                await ensure_topology(connection, Topology(NAMES, replicas=3))
                return connection
            except JetStreamError:
                await asyncio.sleep(0.5)


@pytest.mark.parametrize("name", ["manifests", "chart", pytest.param("chart with that of NATS", marks=needs_nats_chart)])
async def test_what_a_killed_server_led_is_called_to_elect(name: str, tmp_path: Path) -> None:
    """The streams are there for clients without a login, and the electors need no secret."""
    config, container = deployed(name)
    await kill_a_leader(DeployedCluster(tmp_path, config), container, tmp_path)


async def test_with_systemd_the_elector_has_a_login_of_its_own(tmp_path: Path) -> None:
    """Logins are those of `headrace init`, the words those of the unit."""
    logins = tmp_path / "logins"
    assert main(["init", "--out", str(logins), "--elector"]) == 0
    config = (SYSTEMD / "nats-server-cluster.conf").read_text()
    cluster = DeployedCluster(tmp_path, config, (logins / "accounts.conf").read_text())
    (start,) = re.findall(
        r"(?m)^ExecStart=/opt/headrace/bin/headrace (.*)$", (SYSTEMD / "headrace-elector.service").read_text()
    )
    variables = {"HEADRACE_NATS_URL": ",".join("abc"), "HEADRACE_NATS_CONTEXT": str(logins / "elector.json")}
    variables["HEADRACE_LOG_FORMAT"] = "json"
    container = {"args": start.split(), "env": [{"name": name, "value": value} for name, value in variables.items()]}
    operator = ConnectOptions.from_context(str(logins / "operator.json"))
    await kill_a_leader(cluster, container, tmp_path, operator)
    assert "Authorization" not in "".join(cluster.log(number) for number in range(3))


async def kill_a_leader(
    servers: DeployedCluster, container: dict[str, Any], folder: Path, login: ConnectOptions = NO_LOGIN
) -> None:
    """Kill the server that leads the requests, and see that its elections are called, and that this is told."""
    async with servers as cluster:
        connection = await provisioned(cluster, login)
        try:
            requests = NAMES.stream("REQ")
            log = folder / "elector.log"
            assert {read_monitoring(url).electors for url in cluster.monitoring_urls} == {0}
            async with running(container, cluster.urls, log) as page:
                async with asyncio.timeout(WAIT_S):
                    while {read_monitoring(url).electors for url in cluster.monitoring_urls} != {1}:
                        await asyncio.sleep(0.1)
                before = await cluster.leader(requests)
                cluster.kill(int(before[-1]))
                async with asyncio.timeout(WAIT_S):
                    while await cluster.leader(requests) in ("", before):
                        await asyncio.sleep(0.05)
                    while "headrace_elector_gone_servers 1.0" not in await asyncio.to_thread(get, f"{page}/metrics"):
                        await asyncio.sleep(0.1)
                    while not (called := calls(log)) or (  # it may call again between the two
                        f"headrace_elector_elections_called_total {sum(one['groups'] for one in called)}.0"
                        not in await asyncio.to_thread(get, f"{page}/metrics")
                    ):
                        await asyncio.sleep(0.1)
                assert called[0]["gone"] == [before]
                assert json.loads(await asyncio.to_thread(get, f"{page}/ready"))["status"] == "ready"
        finally:
            await connection.close()


def calls(log: Path) -> list[dict[str, Any]]:
    """Return what an elector has logged of the elections that it called."""
    return [json.loads(line) for line in log.read_text().splitlines() if '"elector.called"' in line]


@pytest.mark.parametrize("way", ["reloaded", "started anew"])
async def test_a_running_cluster_without_the_login_gets_it_one_server_at_a_time(way: str, tmp_path: Path) -> None:
    """What is stored stays, clients go on, and electors are let in."""
    config, container = deployed("manifests")
    without = re.sub(r"(?s)accounts \{.*?\n\}", "", config)
    assert without != config
    async with DeployedCluster(tmp_path, without) as cluster:
        connection = await provisioned(cluster)
        try:
            requests = NAMES.stream("REQ")
            cluster.config = config
            for number in range(3):
                if way == "reloaded":
                    cluster.reload(number)
                else:
                    cluster.kill(number)
                    cluster.start(number)
                async with asyncio.timeout(WAIT_S):
                    while not await current(connection, requests):
                        await asyncio.sleep(0.2)
            async with running(container, cluster.urls, tmp_path / "elector.log") as page:
                before = await cluster.leader(requests)
                cluster.kill(int(before[-1]))
                async with asyncio.timeout(WAIT_S):
                    while "headrace_elector_elections_called_total 0.0" in await asyncio.to_thread(get, f"{page}/metrics"):
                        await asyncio.sleep(0.1)
        finally:
            await connection.close()


async def current(connection: Connection, stream: str) -> bool:
    """Return True if a stream has a leader, and all its copies are current."""
    try:
        cluster = (await connection.api.call(f"STREAM.INFO.{stream}"))["cluster"]
    except (ApiError, JetStreamError):
        return False
    return bool(cluster.get("leader")) and [peer["current"] for peer in cluster["replicas"]] == [True, True]
