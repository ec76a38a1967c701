"""An encrypted server of a cluster that was killed in the midst of making a block: what the others give back, and what not."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.core.api import ApiError
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from tests.support.deployed_cluster import DeployedCluster
from tests.support.deployed_files import manifests

pytestmark = pytest.mark.timeout(240)
STREAM = "S"
WAIT_S = 90


def encrypted() -> str:
    config: str = next(each for each in manifests("nats.yaml") if each["kind"] == "ConfigMap")["data"]["nats-server.conf"]
    return config.replace("#cipher: aes", "cipher: aes").replace("#key: $HEADRACE_STORE_KEY", f"key: k{'0e5' * 21}")


async def filled(cluster: DeployedCluster) -> None:
    """Make a stream with three copies, and store into it."""
    body = {"name": STREAM, "subjects": ["s"], "num_replicas": 3, "storage": "file"}
    connection = None
    async with asyncio.timeout(WAIT_S):
        while True:  # all of JetStream has a leader a moment before it answers and makes streams
            try:
                connection = connection or await Connection.connect(
                    ConnectOptions(servers=cluster.urls), subjects=Subjects("hr")
                )
                await connection.api.call(f"STREAM.CREATE.{STREAM}", body)
                break
            except (ApiError, JetStreamError):
                await asyncio.sleep(0.5)
    async with connection:
        for number in range(40):
            await connection.publish("s", b"%d" % number)


def health(cluster: DeployedCluster, number: int) -> str:
    try:
        with urllib.request.urlopen(f"{cluster.monitoring_urls[number]}/healthz", timeout=5) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def stored(url: str) -> int:
    """Return how many messages of the stream a server has."""
    try:
        with urllib.request.urlopen(f"{url}/jsz?accounts=true&streams=true", timeout=5) as answer:
            told = json.load(answer)
    except OSError:
        return 0
    found = [stream for account in told.get("account_details") or () for stream in account.get("stream_detail") or ()]
    return sum(stream["state"]["messages"] for stream in found if stream["name"] == STREAM)


async def healthy(cluster: DeployedCluster, number: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while '"ok"' not in await asyncio.to_thread(health, cluster, number):
            await asyncio.sleep(0.2)


def unfinished(cluster: DeployedCluster, number: int, pattern: str) -> Path:
    """Leave the file of a new block without a key in this server's store, as a kill does."""
    (messages,) = (cluster.folder / f"server-{number}" / "store" / "jetstream").glob(pattern)
    last = max((int(file.stem) for file in messages.glob("*.blk")), default=0)
    block = messages / f"{last + 1}.blk"
    block.touch()
    return block


async def test_a_stream_that_one_server_leaves_out_is_made_again_from_the_others(tmp_path: Path) -> None:
    async with DeployedCluster(tmp_path, encrypted()) as cluster:
        await filled(cluster)
        for number in (0, 1, 2):  # one of them leads
            cluster.kill(number)
            unfinished(cluster, number, f"$G/streams/{STREAM}/msgs")
            cluster.start(number)
            await healthy(cluster, number)
            assert cluster.log(number).count(f'Error recreating stream "{STREAM}": corrupt state file') == 1
        for url in cluster.monitoring_urls:
            async with asyncio.timeout(WAIT_S):
                while await asyncio.to_thread(stored, url) != 40:
                    await asyncio.sleep(0.2)


@pytest.mark.parametrize("group", ["S-*", "_meta_"])
async def test_a_group_whose_log_has_such_a_block_is_whole_after_one_more_start(group: str, tmp_path: Path) -> None:
    """nats-server makes the key that is missing and then gives up: its health names the stream, or it ends."""
    async with DeployedCluster(tmp_path, encrypted()) as cluster:
        await filled(cluster)
        cluster.kill(0)
        block = unfinished(cluster, 0, f"$SYS/_js_/{group}/msgs")
        cluster.start(0)
        process = cluster.processes[0]
        assert process is not None
        async with asyncio.timeout(WAIT_S):
            while "corrupt state file" not in await asyncio.to_thread(health, cluster, 0) and process.poll() is None:
                await asyncio.sleep(0.2)
        assert (process.poll() is not None) == (group == "_meta_")
        cluster.kill(0)
        assert block.with_suffix(".key").exists()
        cluster.start(0)
        await healthy(cluster, 0)
