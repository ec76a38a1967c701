"""Deadlines of runs: on the loop's clock, so that a jump of the machine's clock ends none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from headrace.broker.protocol.run import RunState
from headrace.broker.settings import Timing
from headrace.broker.worker.timers import WorkerTimers


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
