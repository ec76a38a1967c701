"""Contract of an engine's life: healthy while it runs, dead for good after that, and no process left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from headrace.workers.errors import EngineDead
from tests.engine_contract.subject import Subject, greedy


def descendants(pid: int) -> set[int]:
    """The processes that this one and its children have started, and that are not over."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, todo = set(), [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found.update(children)
        todo += children
    return found


class HealthContract:
    """An engine that lives."""

    async def test_it_is_healthy_and_does_not_die_by_itself(self, subject: Subject) -> None:
        await subject.engine.healthy()
        assert subject.engine.blamed() == frozenset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await subject.engine.died()


class Ending:
    """What an engine that has ended must not have left. The fixture `before`: the processes that were there without it."""

    async def stopped(self, subject: Subject, before: set[int]) -> None:
        await subject.engine.stop(5.0)
        with pytest.raises(EngineDead):
            await subject.engine.healthy()
        with pytest.raises(EngineDead):
            await subject.submit(subject.prompt(4), greedy(2))
        left = descendants(os.getpid()) - before
        assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        await subject.engine.stop(1.0)  # twice is fine


class KilledContract(Ending):
    """An engine that is killed."""

    async def test_a_killed_engine_says_so_everywhere_and_leaves_nothing(self, subject: Subject, before: set[int]) -> None:
        assert subject.means.kill is not None
        name = await subject.submit(subject.prompt(1), greedy(subject.info.context_length - 4 * subject.info.block_size))
        await subject.begins(name)
        await subject.means.kill(subject.engine)
        async with asyncio.timeout(30):
            assert await subject.engine.died()
        assert subject.engine.blamed() <= {name}
        with pytest.raises(EngineDead):
            await subject.engine.healthy()
        with pytest.raises(EngineDead):
            await subject.submit(subject.prompt(2), greedy(2))
        await subject.engine.abort([name])
        await self.stopped(subject, before)


class StoppedContract(Ending):
    """An engine that is stopped in good order, with work inside."""

    async def test_a_stopped_engine_is_dead_and_leaves_nothing(self, subject: Subject, before: set[int]) -> None:
        await subject.submit(subject.prompt(3), greedy(subject.info.context_length - 4 * subject.info.block_size))
        await self.stopped(subject, before)
