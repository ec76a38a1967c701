"""The simulator's disk tier lies in a file, written and read by NIXL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.workers.engine import EngineConfig, Output
from headrace.workers.errors import EngineStartFailed
from headrace.workers.sim.answers.tokens import expected_ids
from headrace.workers.sim.engine import SimEngine
from tests.support.nixl_peer import needs_nixl
from tests.support.sim_peer import sequence

pytestmark = [needs_nixl, pytest.mark.slow]

SIZE, BYTES = 4, 4096
ARGS: dict[str, Any] = {
    "block_size": SIZE,
    "blocks": 16,
    "disk_blocks": 40,
    "context_length": 64,
    "kv_block_bytes": BYTES,
}


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = SimEngine()
        self.outputs: dict[str, list[Output]] = {}
        self.ended: dict[str, asyncio.Event] = {}

    def sink(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.id, []).append(output)
            if output.finish or output.fault:
                self.ended[output.id].set()

    async def run(self, name: str, prompt: list[int]) -> Output:
        """Its first output, once it has ended well."""
        self.ended[name] = asyncio.Event()
        await self.engine.submit(sequence(name, prompt, max_tokens=3))
        async with asyncio.timeout(20):
            await self.ended[name].wait()
        assert [token for output in self.outputs[name] for token in output.ids] == expected_ids(prompt, 3)
        return self.outputs[name][0]

    async def stats(self) -> dict[str, Any]:
        return dict(await self.engine.control("stats", {}))

    async def all_written(self) -> int:
        """Blocks on disk, once all of them have been written."""
        async with asyncio.timeout(20):
            while True:
                stats = await self.stats()
                if stats["written_disk_blocks"] >= stats["lower_blocks"]["disk"]:
                    return int(stats["written_disk_blocks"])
                await asyncio.sleep(0.01)

    def file(self) -> int:
        """The file's number in this process: it has no name."""
        for entry in Path("/proc/self/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith(str(self.folder)):
                assert target.endswith("(deleted)")
                return int(entry.name)
        raise AssertionError("there is no file")


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    config = EngineConfig(model="sim", served_name="sim", args={**ARGS, "disk_path": str(tmp_path)})
    await bench.engine.start(config, bench.sink)
    yield bench
    await bench.engine.stop(5.0)


def prompt(first: int) -> list[int]:
    return list(range(first, first + 8 * SIZE + 1))


async def test_blocks_come_back_from_the_file(bench: Bench) -> None:
    for n in range(4):  # nine blocks each, sixteen are there
        await bench.run(f"fill-{n}", prompt(100 * n))
    written = await bench.all_written()
    assert written >= 8
    assert os.fstat(bench.file()).st_size >= 40 * BYTES
    assert any(os.pread(bench.file(), BYTES, n * BYTES).strip(b"\0") for n in range(40))
    again = await bench.run("again", prompt(0))
    assert again.cached_tokens == 8 * SIZE
    assert again.extra is not None
    assert again.extra["cached"] == {"device": 0, "disk": 8 * SIZE}
    assert (await bench.stats())["read_disk_blocks"] == 8
    assert (await bench.stats())["broken_disk_blocks"] == 0


async def test_a_block_that_was_changed_on_disk_is_computed_again(bench: Bench) -> None:
    for n in range(4):
        await bench.run(f"fill-{n}", prompt(100 * n))
    await bench.all_written()
    size = os.fstat(bench.file()).st_size
    for place in range(0, size, BYTES):
        os.pwrite(bench.file(), b"\xff", place + BYTES - 1)
    again = await bench.run("again", prompt(0))
    assert again.cached_tokens == 0
    assert (await bench.stats())["broken_disk_blocks"] == 8
    once_more = await bench.run("once-more", prompt(0))
    assert once_more.cached_tokens == 8 * SIZE


async def test_an_engine_under_pressure_neither_mixes_blocks_up_nor_loses_places(bench: Bench) -> None:
    """Blocks go down, are dropped and come up again while others are still being written."""
    for round_ in range(6):
        runs = [bench.run(f"{round_}-{n}", prompt(100 * n)) for n in range(5)]
        await asyncio.gather(*runs)
    await bench.all_written()
    stats = await bench.stats()
    assert stats["broken_disk_blocks"] == 0
    assert stats["read_disk_blocks"] > 0
    await bench.engine.control("reset_prefix_cache", {})
    for n in range(4):
        await bench.run(f"fresh-{n}", prompt(1000 + 100 * n))
    assert (await bench.stats())["broken_disk_blocks"] == 0


async def test_nothing_is_left_in_the_folder_even_while_it_runs(bench: Bench, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    await bench.engine.stop(5.0)
    with pytest.raises(AssertionError, match="there is no file"):
        bench.file()


async def test_a_folder_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    config = EngineConfig(model="sim", served_name="sim", args={**ARGS, "disk_path": str(tmp_path / "missing")})
    with pytest.raises(EngineStartFailed, match="missing"):
        await SimEngine().start(config, lambda outputs: None)
