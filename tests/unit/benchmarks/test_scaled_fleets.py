"""The benchmark of fleets that the planner scales."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fleet_kinds import Kind
from benchmarks.scaled_fleets import planner_of, play
from headrace.config.options import PlannerSettings
from headrace.tools.replay_bench.engine import EngineModel
from headrace.tools.replay_bench.trace import Trace, TraceRequest

SLOW = Kind("slow", 1.0, EngineModel(blocks=2_000, prefill_rate=8_000.0, base_s=0.016))
QUICK = Kind("quick", 4.0, EngineModel(blocks=8_000, slots=256, prefill_rate=24_000.0, decode_s=0.000_03))
KINDS = {"slow": SLOW, "quick": QUICK}


def trace() -> Trace:
    """Six busy minutes, then four calm ones."""
    busy = [TraceRequest(at_s=0.1 * n, tokens=2000, output=20, chain=()) for n in range(3600)]
    calm = [TraceRequest(at_s=360.0 + 2.0 * n, tokens=2000, output=20, chain=()) for n in range(120)]
    return Trace("", tuple(replace(one, ttft_target_s=0.5 if n % 4 == 0 else 5.0) for n, one in enumerate([*busy, *calm])))


@pytest.mark.slow
def test_fleets_are_scaled_up_and_down_again_and_no_request_is_lost() -> None:
    settings = PlannerSettings(ttft_s=5.0, fleet_ttft="quick=0.5", itl_s=10.0, miss=0.05, start_s=20.0, most=16)
    planners = {name: planner_of(kind, settings) for name, kind in KINDS.items()}
    found = play(trace(), {"quick": 1, "slow": 1}, KINDS, planners, start_s=20.0)
    assert sum(found["starts"].values()) > 0  # type: ignore[attr-defined]
    assert sum(found["drains"].values()) > 0  # type: ignore[attr-defined]
    always = play(trace(), found["most"], KINDS, {}, start_s=20.0)  # type: ignore[arg-type]
    assert found["held_hours"] < always["held_hours"]  # type: ignore[operator]
    assert always["starts"] == {"quick": 0, "slow": 0}
