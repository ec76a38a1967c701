"""A pool without a worker for a moment: new requests wait for it in the queue instead of being refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.topology import Topology
from headrace.tools.chaos.ledger import Outcome
from tests.faults.support.scene import NAMES, Scene, deployed

REQUESTS = 50
MOST = 300
WAIT_S = 2.0
ENDS_AT_ONCE = ("version",)


async def no_worker(scene: Scene) -> bool:
    """The frontend knows of no worker that accepts requests."""
    _, told = await scene.status("/health")
    return [model["workers"] for model in told["models"].values()] == [0]


async def queue_empty(scene: Scene) -> bool:
    return not await scene.connection.subject_counts(NAMES.stream("REQ"), ">")


@pytest.mark.parametrize(
    ("parts", "serving"),
    [
        ({}, "aggregated-1"),
        ({"mode": "disagg", "prefill_workers": 1}, "decode-1"),
    ],
    ids=["aggregated", "prefill and decode apart"],
)
async def test_killing_the_only_worker_under_load_refuses_no_request(
    tmp_path: Path, parts: dict[str, Any], serving: str
) -> None:
    """Without a router the dead worker's lease outlives its restart, so that none is ever missing."""
    async with deployed(tmp_path, **parts) as scene:
        asked = []
        while len(asked) < MOST and (len(asked) < REQUESTS or "requests.held" not in scene.log("frontend-1")):
            asked.append(scene.begin(scene.question(20, stream=len(asked) % 2 == 0)))
            if len(asked) == REQUESTS // 5:
                scene.deployment.kill(scene.process(serving))
            await asyncio.sleep(0.05)
        assert len(asked) < MOST, "no request came while there was no worker"
        await scene.answered(*asked)
        await scene.at_rest()


@pytest.mark.parametrize("routers", [1, 0])
async def test_beyond_the_wait_a_request_is_refused_with_a_time_to_try_again(tmp_path: Path, routers: int) -> None:
    """Scaled to zero. A model that was never served is unknown at once."""
    environment = {"HEADRACE_FRONTEND_NO_WORKER_WAIT_S": f"{WAIT_S:g}"}
    async with deployed(tmp_path, routers=routers, environment=environment) as scene:
        worker = scene.process("aggregated-1")
        command, worker.argv = worker.argv, ENDS_AT_ONCE
        scene.deployment.kill(worker)
        await scene.until("the last worker is gone", lambda: no_worker(scene))
        began = time.monotonic()
        refused = await scene.ask()
        assert (refused.outcome, refused.status) == (Outcome.REFUSED, 503), refused.detail
        assert "no_worker" in refused.detail
        assert time.monotonic() - began >= WAIT_S
        unknown = await scene.ask(extra={"model": "never-seen"})
        assert unknown.status == 404
        await scene.until("nothing is left in the queue, which nobody reads", lambda: queue_empty(scene))
        waiting = scene.begin(scene.question(8))
        worker.argv = command
        await scene.until("a worker is back", scene.ready)
        assert waiting.task is not None
        await waiting.task
        assert waiting.outcome in (Outcome.ANSWERED, Outcome.REFUSED)  # by how long the worker took
        await scene.serves()


async def test_a_model_whose_card_is_lost_stays_known_while_it_is_served(tmp_path: Path) -> None:
    async with deployed(tmp_path) as scene:
        await scene.connection.api.call(f"STREAM.DELETE.KV_{NAMES.bucket('models')}", {})
        await ensure_topology(scene.connection, Topology(NAMES))
        await scene.until("the frontend has noticed", lambda: "card.lost" in scene.log("frontend-1"))
        await scene.answered(await scene.ask())
        await scene.until("the worker has stored it again", lambda: "card.stored_again" in scene.log("aggregated-1"))
        await scene.answered(await scene.ask())
