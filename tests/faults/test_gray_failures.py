"""Workers that are there and do badly: one far slower than its peers, and one whose engine no longer answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from headrace.broker.codec import decode
from headrace.broker.messages.events import JobEvents
from headrace.jetstream.ports import Message
from tests.faults.support.scene import NAMES, Scene, deployed

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

CLIENTS = 6
REQUESTS = 60
SLOWER = 10
SHARE = 0.12  # a third would be fair among equals


async def started(scene: Scene, counts: Counter[str]) -> None:
    """Count, by the name of its process, which worker takes what from now on."""

    def on_events(message: Message) -> None:
        for event in decode(JobEvents, message.data).events:
            if event.kind == "started":
                counts[event.worker.rpartition("-")[0]] += 1

    await scene.connection.subscribe(NAMES.events_filter(), on_events)


async def load(scene: Scene, requests: int) -> None:
    """So many requests by a few clients, each answered right."""
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            await scene.serves(scene.question(20))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def a_slow_worker_is_avoided(folder: Path) -> None:
    """Promise: the router learns how slow it is from its reports, and gives it hardly anything."""
    slow = {"aggregated-3": ("--engine-arg", f'faults={{"slow": {SLOWER}}}')}
    async with deployed(folder, workers=3, flags=slow) as scene:
        await load(scene, CLIENTS * 3)  # everybody has been seen at work
        counts: Counter[str] = Counter()
        await started(scene, counts)
        await load(scene, REQUESTS)
        assert sum(counts.values()) >= REQUESTS
        assert counts["aggregated-3"] <= SHARE * REQUESTS, counts
        assert min(counts["aggregated-1"], counts["aggregated-2"]) > SHARE * REQUESTS, counts
        await scene.at_rest()


async def a_silent_engine_is_found_out(folder: Path) -> None:
    """Promise: a request of its own after idling; without an answer the worker says that its engine is dead, and ends."""
    silent = {"aggregated-2": ("--engine-arg", 'faults={"silent_from_step": 4}')}  # the warm-up is four steps
    environment = {
        "HEADRACE_WORKER_CANARY_S": "1",
        "HEADRACE_WORKER_CANARY_TIMEOUT_S": "1",
        "HEADRACE_WORKER_STALL_S": "8",  # started again it is silent again, and may be asked something before it was idle
    }
    async with deployed(folder, workers=2, flags=silent, environment=environment) as scene:
        healthy = scene.process("aggregated-1").pid
        await scene.until("it is found out", lambda: "engine.died" in scene.log("aggregated-2"))
        assert "was not answered within 1 s after idling" in scene.log("aggregated-2")
        await load(scene, 2 * CLIENTS)
        assert scene.process("aggregated-1").pid == healthy, "an engine that answers was given up"


async def test_a_worker_ten_times_slower_is_avoided_and_an_engine_silent_after_idling_is_found_out(tmp_path: Path) -> None:
    """Two deployments beside each other."""
    await asyncio.gather(a_slow_worker_is_avoided(tmp_path / "slow"), a_silent_engine_is_found_out(tmp_path / "silent"))
