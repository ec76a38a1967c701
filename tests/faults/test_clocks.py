"""The machine's clock jumps by an hour, forth and back, under load.

Every Headrace process reads a clock that the test sets: a module that Python imports at its start puts it in place of
`time.time`. The nats-server keeps its own.
"""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path

import pytest

from tests.faults.support.scene import deployed

pytestmark = [pytest.mark.fault, pytest.mark.timeout(200)]

HOUR_S = 3600.0
STREAMS = 12
CLOCK = """
import mmap, os, struct, time

with open(os.environ["TEST_CLOCK"], "rb") as file:
    offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
real = time.time
time.time = lambda: real() + struct.unpack("d", offset[:8])[0]
"""


class Clock:
    """What all processes of a deployment take for the time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(CLOCK)
        self._file = folder / "offset"
        self._file.write_bytes(struct.pack("d", 0.0))
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths), "TEST_CLOCK": str(self._file)}

    def jump_to(self, offset_s: float) -> None:
        """Set the clock to so much before or after the true time."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("d", offset_s))


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
