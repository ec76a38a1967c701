"""A deployment of the simulator at a cluster of nats-servers, and the load that goes on while the cluster is hurt."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.tools.chaos.deployment import DeploymentShape, Process
from headrace.tools.chaos.ledger import Outcome
from tests.faults.support.scene import NAMES, Asked, Hurt, Scene
from tests.support.nats_cluster import NatsCluster

TOKEN_S = 0.04
SLOTS = 24
AT_FIRST = ("frontend-1", "aggregated-1", "router-1")
SHAPE = DeploymentShape(
    workers=2,
    routers=2,
    frontends=2,
    engine_arguments=(f'timing_overrides={{"decode_base_s": {TOKEN_S}, "prefill_tokens_per_s": 20000}}', f"slots={SLOTS}"),
)


class AtCluster(Hurt):
    """Its processes know all servers of a cluster, which is there before and after them."""

    def __init__(self, folder: Path, cluster: NatsCluster) -> None:
        # On a busy machine elections take longer than the default, and tests are to see that requests wait for them at all.
        environment = {"HEADRACE_FRONTEND_BROKER_WAIT_S": "60"}
        super().__init__(folder, SHAPE, environment, _Ready(cluster), {})  # type: ignore[arg-type]
        self.cluster = cluster

    async def _link(self, process: Process) -> str:
        # A client takes one of its servers by chance. These are most likely at the one that can be cut off.
        often = [self.cluster.urls[0]] * 30 if process.name in AT_FIRST else []
        return ",".join((*often, *self.cluster.urls))


class _Ready:
    """A running cluster in the place of a server."""

    def __init__(self, cluster: NatsCluster) -> None:
        self.url = cluster.url
        self.data_dir = cluster.data_dir
        self.running = True

    async def start_async(self) -> None:
        pass

    async def stop_async(self) -> None:
        pass

    def resume(self) -> None:
        pass


class Load:
    """Streams that are under way, and short requests one after another, at each frontend."""

    def __init__(self, scene: Scene, *, streams: int = 6, tokens: int = 400) -> None:
        self._scene = scene
        self._stop = asyncio.Event()
        self.streams = [scene.begin(scene.question(tokens), frontend=n % 2) for n in range(streams)]
        self.short: list[tuple[float, float, Asked]] = []  # beginning, duration
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(4)]
        self.refused = 0

    async def _ask(self, n: int) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            asked = await self._scene.ask(self._scene.question(8, stream=n < 2), frontend=n % 2)
            if asked.outcome is Outcome.REFUSED:  # said before any work was done
                self.refused += 1
                await asyncio.sleep(0.1)
                continue
            self.short.append((began, time.monotonic() - began, asked))

    async def began(self) -> None:
        for asked in self.streams:
            await asyncio.wait_for(asked.began.wait(), 60)

    async def end(self) -> None:
        """Everybody was answered once and right. Tells how long the longest pauses were (`pytest -s`)."""
        await self._scene.answered(*self.streams)
        self._stop.set()
        await asyncio.gather(*self._tasks)
        await self._scene.answered(*(asked for _, _, asked in self.short))
        gap = max(b - a for asked in self.streams for a, b in pairwise(asked.came))
        slowest = max(took for _, took, _ in self.short)
        print(
            f"longest pause of a stream {gap:.2f} s, slowest of {len(self.short)} short requests {slowest:.2f} s, "
            f"{self.refused} refused"
        )
        await self._scene.well()
        await self._scene.at_rest()


@asynccontextmanager
async def at_cluster(folder: Path, cluster: NatsCluster) -> AsyncIterator[Scene]:
    """Running and well. Nobody was told how many copies of streams there should be."""
    folder.mkdir(parents=True, exist_ok=True)
    async with AtCluster(folder, cluster) as deployment:
        options = ConnectOptions(servers=cluster.urls)
        async with await Connection.connect(options, subjects=NAMES) as connection:
            scene = Scene(deployment, connection, options)
            await scene.well()
            yield scene


def clients_at(server: EmbeddedServer) -> list[str]:
    """The names of the clients of a server."""
    with urllib.request.urlopen(f"{server.monitoring_url}/connz", timeout=2.0) as answer:  # our own
        told: dict[str, Any] = json.load(answer)
    return [str(each.get("name")) for each in told["connections"]]
