from __future__ import annotations

from typing import Any

import msgspec

from headrace.config.planner_settings import PlannerSettings
from headrace.planner.memory import dump, load
from headrace.planner.observation import OutcomeSight, StepSight
from headrace.planner.plan import Plan
from headrace.planner.pool_planner import PoolPlanner
from tests.support.planner_sights import SOME, seen, worker

GOOD = (OutcomeSight(ttft_s=0.1, itl_s=0.01),) * 20
SETTINGS = PlannerSettings(most=10, start_s=20.0, step_s=5.0)


def steps(count: int) -> tuple[StepSight, ...]:
    return tuple(StepSight(step_s=0.01 + 1e-4 * n, prefill_tokens=n, decodes=4) for n in range(0, 100 * count, 100))


def run(some: PoolPlanner, first: int, count: int) -> list[Plan]:
    plans = []
    for i in range(first, first + count):
        here: list[Any] = [worker("a", running=5, start_s=20.0)]
        plan = some.tick(seen(5.0 * i, *here, arrived=(i * 7) % 40, placed=SOME, outputs=(50,), steps=steps(10), ended=GOOD))
        some.acted(plan)
        plans.append(plan)
    return plans


def test_a_planner_that_was_restarted_goes_on_as_if_it_had_not_been() -> None:
    one, other = PoolPlanner(SETTINGS), PoolPlanner(SETTINGS)
    run(one, 0, 60)
    assert load(other, dump(one, model="m", pool="p"), model="m", pool="p")
    after, again = run(one, 60, 20), run(other, 60, 20)
    assert [plan.desired for plan in again] == [plan.desired for plan in after]
    assert [plan.reason for plan in again] == [plan.reason for plan in after]
    assert again[0].supply == after[0].supply  # starts that were under way are not asked for twice
    assert again[0].forecaster == after[0].forecaster
    assert again[0].confidence == after[0].confidence < SETTINGS.confidence, "what no request was late for is kept"


def test_a_peak_that_is_kept_is_remembered_and_memories_from_before_have_none() -> None:
    one, other = PoolPlanner(SETTINGS), PoolPlanner(SETTINGS)
    run(one, 0, 10)
    one.peak.note_ended([OutcomeSight(ttft_s=99.0)] * 1000)
    run(one, 10, 2)
    assert one.peak.rate > 0
    stored = dump(one, model="m", pool="p")
    assert load(other, stored, model="m", pool="p")
    assert other.peak.rate == one.peak.rate
    old = msgspec.msgpack.decode(stored)
    del old["peak"]
    third = PoolPlanner(SETTINGS)
    assert load(third, msgspec.msgpack.encode(old), model="m", pool="p")
    assert third.peak.rate == 0.0


def test_the_memory_of_another_pool_is_not_taken_over() -> None:
    one, other = PoolPlanner(SETTINGS), PoolPlanner(SETTINGS)
    run(one, 0, 10)
    assert not load(other, dump(one, model="m", pool="p"), model="m", pool="q")
    assert not load(other, b"\xc1 nothing", model="m", pool="p")
    assert other.seen_s is None


def test_what_is_stored_of_a_day_is_small() -> None:
    one = PoolPlanner(PlannerSettings())
    for i in range(18_000):
        one.series.add(3, since_s=5.0 * i, until_s=5.0 * (i + 1))
    assert len(dump(one, model="m", pool="p")) < 100_000
