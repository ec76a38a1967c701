"""Runs of judges that are gone: dropped after a fresh read of the lease, and only those that were there before it.

The simulation meets this race once in thousands of schedules, hence a test of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from headrace.broker.worker.gone_judges import GoneJudges
from headrace.jetstream.tasks import TaskScope


@dataclass(eq=False)
class Run:
    """A run of a judge."""

    judge: str


class Bench:
    """A worker whose members say what a test puts in, after `answer` is set."""

    def __init__(self, *judges: str) -> None:
        self.runs = [Run(judge) for judge in judges]
        self.dropped: list[tuple[Run, str]] = []
        self.live: set[str] = set()
        self.asked: list[str] = []
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def ingress_live(self, name: str) -> bool:
        return name in self.live

    async def ingress_gone(self, name: str) -> bool:
        self.asked.append(name)
        return await asyncio.shield(self.answer)

    def drop(self, run: Run, *, how: str) -> None:
        self.dropped.append((run, how))

    def judges(self, tasks: TaskScope) -> GoneJudges:
        played: Any = self  # the worker's state, its members and the lifecycle of its runs
        deps: Any = SimpleNamespace(timing=SimpleNamespace(silence_s=1.0))
        return GoneJudges(deps, played, played, played, tasks)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_runs_that_come_while_the_lease_is_read_stay() -> None:
    async with TaskScope() as tasks:
        bench = Bench("J0", "J0", "J1")
        bench.live = {"J1"}
        bench.judges(tasks).tick(10.0)
        await turn()
        before = bench.runs[:2]
        bench.runs.append(Run("J0"))  # the judge is back and has submitted again
        bench.answer.set_result(True)
        await turn()
        assert bench.dropped == [(run, "judge_gone") for run in before]


async def test_a_judge_whose_lease_is_there_keeps_its_runs() -> None:
    async with TaskScope() as tasks:
        bench = Bench("J0")
        bench.judges(tasks).tick(10.0)
        bench.answer.set_result(False)
        await turn()
        assert bench.asked == ["J0"]
        assert not bench.dropped


async def test_judges_are_looked_for_once_in_a_while() -> None:
    async with TaskScope() as tasks:
        bench = Bench("J0")
        bench.answer.set_result(False)
        judges = bench.judges(tasks)
        for now_s in (10.0, 10.5, 11.0):
            judges.tick(now_s)
            await turn()
        assert bench.asked == ["J0", "J0"]
