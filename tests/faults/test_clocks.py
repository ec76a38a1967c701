"""The machine's clock jumps by an hour, forth and back, under load.

Every Headrace process reads a clock that the test sets; the nats-server keeps its own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.support.scene import deployed
from tests.support.machine_faults import Clock

pytestmark = [pytest.mark.fault, pytest.mark.timeout(200)]

HOUR_S = 3600.0
STREAMS = 12


async def test_a_clock_that_jumps_by_an_hour_costs_no_answer(tmp_path: Path) -> None:
    """Promise: streams that have begun go on to their last token, requests from then on are answered, no lease is lost and no
    part is started again, whichever way the clock of the machine jumps."""
    clock = Clock(tmp_path / "clock")
    engine = ('timing_overrides={"decode_base_s": 0.02, "prefill_tokens_per_s": 20000}',)
    async with deployed(tmp_path / "jumping", environment=clock.environment, engine=engine, workers=2) as scene:
        pids = scene.pids()
        opened = [scene.begin(scene.question(350), deadline_s=60) for _ in range(STREAMS)]
        for asked in opened:
            await asyncio.wait_for(asked.began.wait(), 60)
        for offset_s in (HOUR_S, -HOUR_S, 0.0):
            clock.jump_to(offset_s)
            await asyncio.sleep(0.5)
            await scene.answered(*[scene.begin(scene.question(10, stream=n % 2 == 0), deadline_s=60) for n in range(4)])
            await asyncio.sleep(0.5)
        await scene.answered(*opened)
        assert scene.pids() == pids, "a part was started again"
        assert not any("lease.lapsed" in scene.log(name) for name in pids)
        await scene.at_rest()
