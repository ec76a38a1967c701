"""Deadlines of runs: on the loop's clock, so that a jump of the machine's clock ends none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from headrace.broker.protocol.run import RunState
from headrace.broker.settings import Timing
from headrace.broker.worker.session import GoneJudges, WorkerTimers
from headrace.jetstream.tasks import TaskScope


def failed(now_s: float, *, wall_s: float) -> list[str]:
    """What ends of a run that came when the clocks were 5 and 1,000,000, with 30 s left, at a look at these times."""
    envelope = SimpleNamespace(deadline=1_000_030.0, created=1_000_000.0)
    run = SimpleNamespace(state=RunState.RUNNING, envelope=envelope, due_s=35.0, choices=[])
    ended: list[str] = []
    given: dict[str, Any] = {
        "deps": SimpleNamespace(timing=Timing(), wall=lambda: wall_s),
        "state": SimpleNamespace(runs=[run]),
        "outbox": SimpleNamespace(fail=lambda _run, fault: ended.append(fault.code)),
        **dict.fromkeys(("lease", "lapses", "trial", "gone_judges")),
    }
    WorkerTimers(**cast("Any", given))._look_at_runs(now_s)
    return ended


def test_a_run_ends_when_its_deadline_has_passed() -> None:
    assert failed(34.9, wall_s=1_000_029.9) == []
    assert failed(35.0, wall_s=1_000_030.0) == ["deadline_exceeded"]


def test_a_clock_that_jumps_ends_no_run_and_lets_none_live_longer() -> None:
    for jump_s in (3600.0, -3600.0):
        assert failed(34.9, wall_s=1_000_029.9 + jump_s) == []
        assert failed(35.0, wall_s=1_000_030.0 + jump_s) == ["deadline_exceeded"]


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
