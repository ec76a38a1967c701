"""Frontends that die or stand still, and parts that are cut off from the broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.tools.chaos.deployment import until_at_rest
from headrace.tools.chaos.ledger import Outcome
from tests.faults.support.scene import NAMES, deployed

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

LEASE_S = 4.0
GONE_S = 20.0  # lease, look, drop; with room for a busy machine


async def a_frontend_dies_and_another_stands_still(folder: Path) -> None:
    """Promise: within seconds their work is dropped and its blocks are free; the others notice nothing. The one that comes
    back submits its requests again, and its clients lose no token."""
    async with deployed(folder, frontends=3) as scene:
        dying = [scene.begin(scene.question(5000), frontend=0) for _ in range(2)]
        frozen = [scene.begin(scene.question(500), frontend=1) for _ in range(2)]
        for asked in (*dying, *frozen):
            await asyncio.wait_for(asked.began.wait(), 60)
        scene.deployment.kill(scene.process("frontend-1"))
        scene.deployment.freeze(scene.process("frontend-2"))
        for _ in range(3):
            await scene.serves(frontend=2)

        async def dropped() -> bool:
            return await scene.held() == 0

        await scene.until("their work is dropped", dropped, GONE_S)
        found = await until_at_rest(scene.connection, NAMES, scene.deployment.frontends[2:], timeout_s=GONE_S)
        assert not any(found.counts.values()), found
        for asked in dying:
            assert asked.task is not None
            assert (await asked.task).outcome is Outcome.CUT
        scene.deployment.thaw(scene.process("frontend-2"))
        await scene.answered(*frozen)
        assert "job.resubmitted" in scene.log("frontend-2")
        await scene.well()
        await scene.at_rest()


async def a_worker_and_a_frontend_are_cut_off(folder: Path) -> None:
    """Promise: the worker's requests go on elsewhere; it sends nothing, keeps its engine, and what it says about its old work
    when it is back (frames, acks) changes nothing. The frontend takes nothing new meanwhile; its streams wait and go on."""
    async with deployed(folder, workers=2, frontends=2) as scene:
        pids = scene.pids()
        near = [scene.begin(scene.question(700)) for _ in range(4)]
        far = [scene.begin(scene.question(700), frontend=1) for _ in range(2)]
        for asked in (*near, *far):
            await asyncio.wait_for(asked.began.wait(), 60)
        worker, frontend = scene.process("aggregated-1"), scene.process("frontend-2")
        assert (await scene.inspections())["aggregated-1"].runs, "it has nothing to lose"
        scene.deployment.cut(worker)
        scene.deployment.cut(frontend)
        await scene.until("it is not ready", lambda: scene.not_ready(frontend=1), 10 * LEASE_S)
        refused = await scene.ask(frontend=1)
        assert (refused.outcome, refused.status) == (Outcome.REFUSED, 503), refused.detail
        await scene.serves()
        await asyncio.sleep(LEASE_S)
        scene.deployment.mend(worker)
        scene.deployment.mend(frontend)
        await scene.answered(*near, *far)
        await scene.well()
        assert scene.pids() == pids, "an engine was started again"
        assert "lease.lapsed" in scene.log("aggregated-1")
        await scene.serves(frontend=1)
        await scene.at_rest()


async def test_frontends_that_die_or_stand_still_and_parts_that_are_cut_off_cost_nobody_a_request(tmp_path: Path) -> None:
    """Two deployments beside each other."""
    await asyncio.gather(
        a_frontend_dies_and_another_stands_still(tmp_path / "gone"), a_worker_and_a_frontend_are_cut_off(tmp_path / "cut")
    )
