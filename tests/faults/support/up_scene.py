"""A `headrace up` that a scenario hurts as a whole, with clients who know every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.tools.chaos.client import Address
from headrace.tools.chaos.deployment import ChaosDeployment
from tests.faults.support.scene import NAMES, Asked, Scene
from tests.support.up_process import RunningUp


def simulator(token_s: float = 0.02) -> tuple[str, ...]:
    """Flags for engines with this time per token, whose answers end when the request says so."""
    timing = f'timing_overrides={{"decode_base_s": {token_s}, "prefill_tokens_per_s": 20000}}'
    return ("--engine-arg", timing, "--engine-arg", "mean_output_tokens=0")


class UpScene(Scene):
    """What a scenario does to a running `up` and looks at."""

    def __init__(self, up: RunningUp) -> None:
        self.up = up
        port = int(up.state()["url"].rpartition(":")[2])
        frontends = [Address("frontend", "127.0.0.1", port)]
        shape = SimpleNamespace(frontends=frontends, folder=up.log_file.parent, processes=())
        super().__init__(cast("ChaosDeployment", shape), cast("Connection", None), ConnectOptions())

    def tails(self) -> str:
        return self.up.log()

    async def streams(self, count: int, tokens: int) -> list[Asked]:
        """Open some, and wait until each of them has begun."""
        opened = [self.begin(self.question(tokens)) for _ in range(count)]
        for asked in opened:
            await asyncio.wait_for(asked.began.wait(), 60)
        return opened

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Nothing in flight, queued, held or left behind."""
        options = self.up.connect_options()
        async with await Connection.connect(options, subjects=NAMES) as self.connection:
            await self.at_rest(timeout_s)


@asynccontextmanager
async def upped(folder: Path, *flags: str) -> AsyncIterator[UpScene]:
    """A ready `headrace up` in this folder, gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".headrace" / "run" / "up.json").unlink(missing_ok=True)  # of one that was killed
    up = await asyncio.to_thread(RunningUp, folder, *flags)
    try:
        await asyncio.to_thread(up.until_ready)
        yield UpScene(up)
    finally:
        await asyncio.to_thread(up.stop)


def alive(pids: list[int]) -> list[int]:
    """Those of them that still run."""
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
