"""More clients at once than there are slots, and answers longer than any process lives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.support.scene import Scene, deployed

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


async def test_a_thousand_clients_at_once_are_all_answered(tmp_path: Path) -> None:
    """Promise: none is refused, cut or answered wrong, and nothing is left behind. There are slots for a tenth of them."""
    engine = ('timing_overrides={"decode_base_s": 0.01, "prefill_tokens_per_s": 200000}', "slots=48")
    async with deployed(tmp_path, engine=engine, workers=2, frontends=2) as scene:
        asked = [
            scene.begin(scene.question(4 + n % 9, stream=n % 3 > 0, prompt=16), frontend=n % 2, deadline_s=120)
            for n in range(1000)
        ]
        await scene.answered(*asked)
        await scene.at_rest()


TOKENS = 10_000


async def kill_its_worker(scene: Scene) -> None:
    """Kill the worker that runs the one request there is. On a busy machine it may be moved, or not be told of, at a look."""
    async with asyncio.timeout(30):
        while True:
            for name, inspection in (await scene.inspections()).items():
                if inspection.runs:
                    scene.deployment.kill(scene.process(name))
                    return
            await asyncio.sleep(0.05)


async def test_a_stream_of_ten_thousand_tokens_outlives_five_kills_of_its_worker(tmp_path: Path) -> None:
    """Promise: every token once, in order. Its worker is killed every other second; a request that makes progress between two
    crashes is not the cause of them."""
    engine = ('timing_overrides={"decode_base_s": 0.0016, "prefill_tokens_per_s": 2000000}', "context_length=16384")
    async with deployed(tmp_path, engine=engine, workers=3) as scene:
        asked = scene.begin(scene.question(TOKENS))
        await asyncio.wait_for(asked.began.wait(), 60)
        for kill in range(5):
            goal = len(asked.came) + 1
            await scene.until("it goes on", lambda goal=goal: len(asked.came) > goal)  # type: ignore[misc]
            await asyncio.sleep(1.5 if kill < 3 else 2.5)
            assert asked.task is not None
            assert not asked.task.done(), (asked.outcome, asked.detail)
            await kill_its_worker(scene)
        await scene.answered(asked)
        await scene.at_rest()
