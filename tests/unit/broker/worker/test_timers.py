"""Deadlines of runs, when the machine's clock jumps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from headrace.broker.protocol.run import RunState
from headrace.broker.settings import Timing
from headrace.broker.worker.timers import WorkerTimers


class Bench:
    """Timers over one running run that has 30 s left."""

    def __init__(self) -> None:
        self.wall_s = 1_000_000.0
        envelope = SimpleNamespace(deadline=self.wall_s + 30.0, created=self.wall_s)
        self.run = SimpleNamespace(run=7, state=RunState.RUNNING, envelope=envelope, choices=[])
        self.failed: list[str] = []
        deps = SimpleNamespace(timing=Timing(), wall=lambda: self.wall_s)
        outbox = SimpleNamespace(fail=lambda _run, fault: self.failed.append(fault.code))
        state = SimpleNamespace(runs=[self.run])
        made: dict[str, Any] = {"deps": deps, "state": state, "outbox": outbox}
        rest = dict.fromkeys(("lease", "lapses", "trial", "gone_judges"))
        self.timers = WorkerTimers(**cast("Any", {**made, **rest}))

    def look(self, now_s: float) -> list[str]:
        self.timers._look_at_runs(now_s)
        return self.failed


def test_a_run_ends_when_its_deadline_has_passed() -> None:
    bench = Bench()
    assert bench.look(5.0) == []
    bench.wall_s += 29.9
    assert bench.look(34.9) == []
    bench.wall_s += 0.1
    assert bench.look(35.0) == ["deadline_exceeded"]


def test_a_clock_that_jumps_ends_no_run_and_lets_none_live_longer() -> None:
    for jump_s in (3600.0, -3600.0):
        bench = Bench()
        bench.look(5.0)
        bench.wall_s += jump_s
        assert bench.look(34.9) == []
        assert bench.look(35.0) == ["deadline_exceeded"]


def test_a_run_that_is_gone_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.look(5.0)
    bench.timers._state.runs = cast("Any", [])
    bench.look(6.0)
    assert bench.timers._deadlines == {}
