from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.options import PlannerSettings
from headrace.planner.observe import OutcomeSight, RequestSight, StepSight
from headrace.planner.plan import REASONS, Action, Plan
from headrace.planner.pool_planner import PoolPlanner, dump, load
from tests.support.planner_sights import PROFILE, SOME, seen, worker


def planner(*, profile: bool = True, **kw: Any) -> PoolPlanner:
    values: dict[str, Any] = {"most": 10, "start_s": 30.0, "down_s": 30.0, "step_s": 5.0, **kw}
    return PoolPlanner(PlannerSettings(**values), profile=PROFILE if profile else None)


def ticks(some: PoolPlanner, count: int, *workers: Any, since: float = 0.0, **kw: Any) -> Plan:
    """Run ticks of five seconds and return the last plan. Nothing is acted upon."""
    values = {"placed": SOME, "outputs": (100,), **kw}
    return [some.tick(seen(since + 5.0 * i, *workers, **values)) for i in range(count)][-1]


def test_at_zero_traffic_every_figure_is_a_number_and_a_surplus_leaves() -> None:
    some = planner()
    plan = ticks(some, 40, worker("a"), worker("b"), arrived=0, placed=(), outputs=())
    assert plan.desired == {"aggregated": 2}  # no request was seen, so nothing is known of its costs
    ticks(some, 1, worker("a"), worker("b"), since=200, arrived=1)
    plan = ticks(some, 40, worker("a"), worker("b"), since=205, arrived=0, placed=(), outputs=())
    assert (plan.reason, plan.desired) == ("surplus", {"aggregated": 1})
    assert plan.forecast == 0.0
    assert plan.actions == (Action(kind="drain", role="aggregated", worker="a"),)


def test_more_arrivals_want_more_workers() -> None:
    plan = ticks(planner(), 10, worker("a", running=20), arrived=100)
    assert plan.reason == "forecast"
    assert 2 < plan.desired["aggregated"] <= 10
    assert {action.kind for action in plan.actions} == {"start"}


def test_those_that_were_refused_count_as_arrivals() -> None:
    plan = ticks(planner(), 10, worker("a", running=20), arrived=10, refused=90)
    assert plan.desired["aggregated"] > 2


def test_workers_that_nobody_can_see_decide_nothing() -> None:
    some = planner()
    ticks(some, 10, worker("a"), arrived=100)
    blind = msgspec.structs.replace(seen(60, arrived=100), workers=None)
    plan = some.tick(blind)
    assert (plan.reason, plan.actions) == ("workers_unknown", ())


def test_stale_load_decides_nothing() -> None:
    some = planner()
    plan = ticks(some, 20, worker("a", report_age_s=60.0), worker("b", report_age_s=60.0), arrived=500)
    assert (plan.reason, plan.actions) == ("load_stale", ())


def test_an_unknown_number_of_arrivals_is_not_zero_and_lets_none_leave() -> None:
    some = planner()
    ticks(some, 10, worker("a"), worker("b"), arrived=1)
    plan = ticks(some, 60, worker("a"), worker("b"), since=50, arrived=None)
    assert (plan.reason, plan.desired) == ("arrivals_unknown", {"aggregated": 2})


def test_a_worker_whose_load_is_unknown_is_not_idle() -> None:
    plan = ticks(planner(), 60, worker("a"), worker("b", report_age_s=None), arrived=0)
    assert (plan.reason, plan.desired) == ("would_not_fit", {"aggregated": 2})


def test_starts_under_way_are_supply() -> None:
    some = planner()
    plan = ticks(some, 10, worker("a", running=20), arrived=100)
    some.acted(plan)
    after = ticks(some, 1, worker("a", running=20), since=50, arrived=100)
    assert after.supply == plan.desired
    assert after.reason in ("starting", "forecast")
    assert len(after.actions) <= 1


def test_a_start_that_never_shows_is_asked_for_again() -> None:
    some = planner()
    some.acted(ticks(some, 10, worker("a", running=20), arrived=100))
    plan = ticks(some, 10, worker("a", running=20), since=50, arrived=100)
    assert plan.supply["aggregated"] > 1
    plan = ticks(some, 10, worker("a", running=20), since=100, arrived=100)
    assert some.starts.lost > 0
    assert plan.actions
    assert plan.actions[0].kind == "start"


def test_what_is_there_counts_and_not_what_was_wanted() -> None:
    some = planner()
    ticks(some, 10, worker("a", running=20), arrived=100)
    there = [worker(f"w{i}", running=1) for i in range(9)]  # somebody else has started more than were asked for
    plan = ticks(some, 1, *there, since=50, arrived=100)
    assert plan.supply == {"aggregated": 9}


def test_after_too_many_late_requests_the_workers_of_the_highest_load_stay() -> None:
    some = planner()
    late = tuple(OutcomeSight(ttft_s=99.0) for _ in range(500))
    ticks(some, 10, worker("a", running=20), arrived=100, ended=late)
    plan = ticks(some, 200, worker("a"), since=50, arrived=1)
    assert plan.reason == "peak_kept"
    assert plan.desired["aggregated"] > 2
    quiet = planner()
    ticks(quiet, 10, worker("a", running=20), arrived=100)
    assert ticks(quiet, 200, worker("a"), since=50, arrived=1).desired == {"aggregated": 1}


def test_without_load_no_tick_asks_for_more() -> None:
    some = planner()
    for i in range(200):
        plan = some.tick(seen(5.0 * i, worker("a"), placed=SOME if not i else ()))
        some.acted(plan)
        assert plan.desired == {"aggregated": 1}, i


def test_requests_that_wait_in_a_burst_are_seen_though_the_rates_are_low() -> None:
    late = tuple(RequestSight(prompt=100, uncached=100, waited_s=9.0) for _ in range(12))
    plan = ticks(planner(), 6, worker("a", running=2), arrived=1, placed=late)
    assert (plan.reason, plan.desired) == ("waits_late", {"aggregated": 2})
    plan = ticks(planner(), 6, worker("a", running=32), arrived=1, waiting=5000)
    assert plan.reason == "backlog"


def test_a_prompt_that_is_later_than_the_target_by_itself_grows_nothing_without_bound() -> None:
    huge = tuple(RequestSight(prompt=60_000, uncached=60_000) for _ in range(10))
    plan = ticks(planner(most=100), 20, worker("a", running=1), arrived=0, placed=huge)
    assert (plan.reason, plan.desired) == ("target_unreachable", {"aggregated": 1})
    plan = ticks(planner(most=100), 20, worker("a", running=1), arrived=1, placed=huge)
    assert plan.desired["aggregated"] <= 6


def test_no_more_than_the_most_are_wanted() -> None:
    plan = ticks(planner(most=3), 10, worker("a"), worker("b"), worker("c"), arrived=10_000)
    assert (plan.reason, plan.desired) == ("at_maximum", {"aggregated": 3})


def test_fewer_than_the_least_are_made_up_for() -> None:
    plan = planner(least=2).tick(seen(0, worker("a")))
    assert (plan.reason, plan.desired) == ("below_minimum", {"aggregated": 2})


def test_a_planner_that_starts_again_leaves_an_idle_pool_without_workers_at_zero() -> None:
    some = planner(least=0, idle_s=60.0)
    ticks(some, 40, worker("a"), arrived=1)
    ticks(some, 100, worker("a"), since=200, arrived=0)
    assert ticks(some, 10, since=700, arrived=0).desired == {"aggregated": 0}
    other = planner(least=0, idle_s=60.0)
    assert load(other, dump(some, model="m", pool="p"), model="m", pool="p")
    plan = ticks(other, 1, since=760, arrived=None)  # it has only begun to listen
    assert (plan.desired, plan.actions) == ({"aggregated": 0}, ())
    assert ticks(other, 1, since=765, arrived=None, waiting=1).desired == {"aggregated": 1}


def test_an_idle_pool_goes_to_zero_and_a_request_brings_it_back() -> None:
    some = planner(least=0, idle_s=60.0)
    ticks(some, 4, worker("a"), arrived=1)
    plan = ticks(some, 10, worker("a"), since=20, arrived=0, placed=(), outputs=())
    assert plan.desired == {"aggregated": 1}
    plan = ticks(some, 60, worker("a"), since=70, arrived=0, placed=(), outputs=())
    assert (plan.reason, plan.desired) == ("idle", {"aggregated": 0})
    some.acted(plan)
    plan = ticks(some, 3, since=370, arrived=0, placed=(), outputs=())
    assert (plan.reason, plan.actions) == ("steady", ())
    plan = ticks(some, 1, since=390, arrived=1, waiting=1, placed=(), outputs=())
    assert (plan.reason, plan.actions) == ("from_zero", (Action(kind="start", role="aggregated"),))


def test_a_pool_whose_speed_is_unknown_comes_back_from_zero_too() -> None:
    plan = ticks(planner(profile=False, least=0), 1, arrived=1, waiting=1, placed=(), outputs=())
    assert (plan.reason, plan.actions) == ("from_zero", (Action(kind="start", role="aggregated"),))


def test_prefill_and_decode_are_counted_apart_and_the_one_that_is_spare_changes_its_role() -> None:
    split = [worker(f"p{i}", "prefill", roles=("decode",)) for i in range(4)] + [worker("d1", "decode", running=30)]
    short = tuple(RequestSight(prompt=100, uncached=100) for _ in range(10))
    plan = ticks(planner(), 20, *split, arrived=40, placed=short, outputs=(2000,))
    assert plan.desired["decode"] > 1
    assert plan.desired["prefill"] < 4
    assert plan.reason == "role_shift"
    assert plan.actions[0].kind == "role"


def test_batch_work_is_started_for_by_its_deadline() -> None:
    plan = ticks(planner(), 3, worker("a"), backlog=((600.0, 50_000),))
    assert plan.reason == "batch_deadline"
    assert plan.desired["aggregated"] > 3


def test_speeds_are_learnt_from_steps() -> None:
    some = planner(profile=False)
    steps = tuple(StepSight(step_s=0.01 + 1e-4 * n, prefill_tokens=n, decodes=4) for n in (0, 500, 1000, 2000))
    ticks(some, 4, worker("a", running=4), arrived=5, steps=steps)
    assert not some.curves["aggregated"].known
    plan = ticks(some, 10, worker("a", running=4), since=20, arrived=5, steps=steps)
    assert plan.capacity["aggregated"] > 0


observations = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 500)),  # arrived
        st.one_of(st.none(), st.integers(0, 500)),  # waiting
        st.integers(0, 6),  # workers there
        st.integers(0, 32),  # each runs
        st.sampled_from([None, 0.1, 60.0]),  # age of reports
        st.floats(0.1, 60),  # since the last tick
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(observations, st.integers(0, 3), st.booleans())
def test_whatever_is_seen_a_tick_has_one_reason_and_numbers_within_bounds(
    told: list[tuple[int | None, int | None, int, int, float | None, float]], least: int, profile: bool
) -> None:
    some = planner(least=least, most=8, profile=profile, idle_s=30.0)
    at = 0.0
    for arrived, waiting, count, running, age_s, took_s in told:
        at += took_s
        there = [worker(f"w{i}", running=running, report_age_s=age_s) for i in range(count)]
        plan = some.tick(seen(at, *there, arrived=arrived, waiting=waiting, placed=SOME))
        some.acted(plan)
        assert plan.reason in REASONS
        supply = plan.supply.get("aggregated", 0)
        for desired in plan.desired.values():
            assert 0 <= desired <= max(8, supply)
        if plan.reason in ("workers_unknown", "load_stale"):
            assert not plan.actions
        drained = [action for action in plan.actions if action.kind == "drain"]
        if drained:
            assert arrived is not None
            assert waiting is not None
            assert age_s is not None
            assert plan.desired["aggregated"] >= least


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=20, max_size=150))
def test_no_number_goes_up_down_and_up_within_two_start_ups(arrivals: list[int]) -> None:
    some = planner(start_s=30.0, down_s=5.0)
    there: dict[str, float] = {"w0": 0.0}
    turns: list[tuple[float, int]] = []
    for i, arrived in enumerate(arrivals):
        at = 5.0 * i
        plan = some.tick(seen(at, *(worker(n) for n, ready in there.items() if ready <= at), arrived=arrived, placed=SOME))
        some.acted(plan)
        for action in plan.actions:
            if action.kind == "start":
                there[f"w{len(turns) + 1}"] = at + 30.0
                turns.append((at, 1))
            elif action.kind == "drain":
                there.pop(action.worker)
                turns.append((at, -1))
    for i, (up, sign) in enumerate(turns):
        downs = [at for at, other in turns[i + 1 :] if other < 0]
        if sign > 0 and downs:
            again = [at for at, other in turns if other > 0 and at > downs[0]]
            assert not again or again[0] - up >= 60.0


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


def test_a_peak_that_is_kept_is_remembered() -> None:
    one, other = PoolPlanner(SETTINGS), PoolPlanner(SETTINGS)
    run(one, 0, 10)
    one.peak.note_ended([OutcomeSight(ttft_s=99.0)] * 1000)
    run(one, 10, 2)
    assert one.peak.rate > 0
    stored = dump(one, model="m", pool="p")
    assert load(other, stored, model="m", pool="p")
    assert other.peak.rate == one.peak.rate


def test_the_memory_of_another_pool_is_not_taken_over() -> None:
    one, other = PoolPlanner(SETTINGS), PoolPlanner(SETTINGS)
    run(one, 0, 10)
    assert not load(other, dump(one, model="m", pool="p"), model="m", pool="q")
    assert not load(other, b"\xc1 nothing", model="m", pool="p")
    assert not load(other, msgspec.msgpack.encode({"version": 1, "model": "m", "pool": "p"}), model="m", pool="p")
    assert other.seen_s is None


def test_what_is_stored_of_a_day_is_small() -> None:
    one = PoolPlanner(PlannerSettings())
    for i in range(18_000):
        one.series.add(3, since_s=5.0 * i, until_s=5.0 * (i + 1))
    assert len(dump(one, model="m", pool="p")) < 100_000
