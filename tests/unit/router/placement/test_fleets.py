"""Targets as they arrive."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.control import FleetDecision
from headrace.router.placement.fleet_grid import parse_grid
from headrace.router.placement.fleets import (
    LATE,
    MEETS,
    MOST_TARGET_S,
    UNKNOWN,
    Asker,
    FleetState,
    Forecast,
    Preference,
    Targets,
    prefer,
    target_of,
)
from headrace.router.placement.scheduler import Scheduler
from tests.support.router.placement_pool import BLOCK, Pool, chain
from tests.unit.router.placement.test_fleet_grid import AGG, DISAGG


@pytest.mark.parametrize(
    ("asked", "target"), [(None, 2.0), (nan, 2.0), (0.0, 0.0), (-3.0, 0.0), (0.25, 0.25), (inf, MOST_TARGET_S), (-inf, 0.0)]
)
def test_a_target_is_clamped_to_what_can_be_and_zero_counts(asked: float | None, target: float) -> None:
    assert target_of(asked, 2.0) == target


@given(st.floats())
def test_any_number_becomes_a_finite_target(asked: float) -> None:
    assert 0.0 <= target_of(asked, 1.0) <= MOST_TARGET_S


CHEAP = FleetState("cheap", 1.0, (0,), free_slots=2, slots=2, workers=1)
TARGETS = Targets(1.0, 0.05)
DEAR = FleetState("dear", 4.0, (1,), free_slots=2, slots=2, workers=1)


def preferred(
    ttft: tuple[float, float],
    *,
    itl: tuple[float, float] = (0.01, 0.01),
    known: tuple[bool, bool] = (True, True),
    target: Targets = TARGETS,
    count: int = 1,
    output: float = 10.0,
    age_s: float = 0.0,
) -> list[Preference]:
    forecast = Forecast(np.array([ttft] * count), np.array([ttft] * count), np.array(itl), np.array(known))
    return prefer([Asker(target, age_s, output)] * count, forecast, [CHEAP, DEAR])


def test_the_cheapest_fleet_that_is_predicted_to_meet_the_targets_is_preferred() -> None:
    (found,) = preferred((0.8, 0.1))
    assert found.ranks == (0, 1)
    assert [outlook.state for outlook in found.outlooks] == [MEETS, MEETS]


def test_a_dearer_fleet_is_preferred_when_the_cheap_one_is_predicted_to_be_late() -> None:
    (found,) = preferred((1.2, 0.1))
    assert found.ranks == (1, 0)
    (found,) = preferred((0.8, 0.1), age_s=0.5)
    assert found.ranks == (1, 0), "what a request has waited counts"


def test_a_time_between_tokens_that_is_too_long_counts_as_a_first_token_that_is_too_late() -> None:
    (found,) = preferred((0.1, 0.1), itl=(0.06, 0.02))
    assert found.ranks == (1, 0)


def test_without_a_fleet_that_meets_the_targets_the_least_late_one_is_preferred() -> None:
    (found,) = preferred((3.0, 2.0))
    assert found.ranks == (1, 0)
    (found,) = preferred((2.0, 3.0))
    assert found.ranks == (0, 1)


def test_a_target_of_zero_is_a_target() -> None:
    (found,) = preferred((0.5, 0.4), target=Targets(0.0, 0.05))
    assert found.ranks == (1, 0)
    assert [outlook.state for outlook in found.outlooks] == [LATE, LATE]


def test_a_longer_answer_weighs_slow_tokens_more_than_a_late_first_one() -> None:
    short, long = (
        preferred((0.9, 2.0), itl=(0.08, 0.05), target=Targets(1.0, 0.05), output=output)[0] for output in (10.0, 100.0)
    )
    assert short.ranks == (0, 1)
    assert long.ranks == (1, 0)


def test_a_fleet_of_which_nothing_is_known_comes_after_a_late_one() -> None:
    (found,) = preferred((0.0, 9.0), known=(False, True))
    assert found.ranks == (1, 0)
    assert found.outlooks[0].state == UNKNOWN
    assert found.outlooks[0].ttft_s == inf


def test_with_nothing_known_of_any_fleet_the_price_decides() -> None:
    (found,) = preferred((0.0, 0.0), known=(False, False))
    assert found.ranks == (0, 1)


def test_requests_before_one_in_the_window_count_as_queue_of_the_fleet_that_they_prefer() -> None:
    found = preferred((0.3, 0.3), count=8)
    assert [one.ranks for one in found[:3]] == [(0, 1)] * 3
    assert (1, 0) in [one.ranks for one in found], "the cheap fleet is full of them before the eighth"


def test_requests_for_which_workers_stand_open_are_no_queue() -> None:
    wide = FleetState("cheap", 1.0, (0,), free_slots=64, slots=64, workers=8, open=8)
    forecast = Forecast(
        np.array([[0.9, 0.1]] * 12), np.array([[0.9, 0.1]] * 12), np.array([0.01, 0.01]), np.array([True, True])
    )
    found = prefer([Asker(TARGETS, 0.0, 1.0)] * 12, forecast, [wide, DEAR])
    assert [one.ranks for one in found[:9]] == [(0, 1)] * 9
    assert found[11].ranks == (1, 0)


def test_fleets_of_one_price_that_both_meet_the_targets_leave_the_choice_to_cost() -> None:
    forecast = Forecast(np.array([[0.8, 0.1]]), np.array([[0.8, 0.1]]), np.array([0.01, 0.01]), np.array([True, True]))
    same = [CHEAP, FleetState("other", 1.0, (1,), free_slots=2, slots=2, workers=1)]
    assert prefer([Asker(Targets(1.0, 0.05), 0.0, 1.0)], forecast, same)[0].ranks == (0, 0)


seconds = st.floats(0.0, 100.0)


@given(
    st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12),
    st.tuples(seconds, seconds),
    st.tuples(st.booleans(), st.booleans()),
    st.tuples(seconds, seconds),
    st.integers(1, 4),
)
def test_whatever_is_predicted_one_fleet_is_first_and_none_that_meets_comes_after_one_that_does_not(
    ttft: list[tuple[float, float]],
    itl: tuple[float, float],
    known: tuple[bool, bool],
    target: tuple[float, float],
    routers: int,
) -> None:
    forecast = Forecast(np.array(ttft), np.array(ttft), np.array(itl), np.array(known))
    found = prefer([Asker(Targets(*target), 0.5, 20.0)] * len(ttft), forecast, [CHEAP, DEAR], routers=routers, margin=0.1)
    assert len(found) == len(ttft)
    for one in found:
        assert 0 in one.ranks
        states = [outlook.state for _, outlook in sorted(zip(one.ranks, one.outlooks, strict=True), key=lambda pair: pair[0])]
        assert states == sorted(states)
        for at, outlook in enumerate(one.outlooks):
            assert (outlook.state == UNKNOWN) == (not known[at])
            assert outlook.late_s >= 0.0
        if one.outlooks[0].state == MEETS:
            assert one.ranks == (0, 1), "the cheaper one"


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=12))
def test_more_requests_before_one_never_make_its_outlook_better(ttft: list[tuple[float, float]]) -> None:
    def last(rows: list[tuple[float, float]]) -> Preference:
        forecast = Forecast(np.array(rows), np.array(rows), np.array([0.01, 0.01]), np.array([True, True]))
        return prefer([Asker(Targets(5.0, 0.05), 0.0, 20.0)] * len(rows), forecast, [CHEAP, DEAR])[-1]

    alone, behind = last(ttft[-1:]), last(ttft)
    for one, other in zip(alone.outlooks, behind.outlooks, strict=True):
        assert other.ttft_s >= one.ttft_s


PROMPT = chain(1, 20)  # 10,240 tokens: 0.43 s at the speed assumed


def fleets(**settings: Any) -> Pool:
    """A cheap worker `a` and a dear worker `b`, both idle."""
    pool = Pool("", **settings)
    pool.join("a", fleet="cheap", price=1.0)
    pool.join("b", fleet="dear", price=4.0)
    pool.report("a")
    pool.report("b")
    return pool


def decision(pool: Pool) -> FleetDecision:
    found = pool.placement().fleet
    assert found is not None
    return found


def test_an_idle_cheap_fleet_gets_a_request_that_it_can_serve_in_time() -> None:
    pool = fleets()
    pool.offer("r", PROMPT, ttft_target_s=1.0)
    found = decision(pool)
    assert (found.fleet, found.reason, found.ttft_target_s) == ("cheap", "cheapest", 1.0)
    assert {option.fleet: option.state for option in found.options} == {"cheap": "meets", "dear": "meets"}


def test_a_request_that_the_cheap_fleet_would_serve_too_late_goes_to_the_dear_one() -> None:
    pool = fleets()
    pool.report("a", running=1, queued_prefill_tokens=24_000)
    pool.offer("r", PROMPT, ttft_target_s=1.0)
    found = decision(pool)
    assert (found.fleet, found.reason) == ("dear", "meets")


def test_a_target_of_zero_goes_where_it_is_least_late() -> None:
    pool = fleets()
    pool.report("a", running=1, queued_prefill_tokens=1000)
    pool.offer("r", PROMPT, ttft_target_s=0.0)
    found = decision(pool)
    assert (found.fleet, found.reason) == ("dear", "least_late")


def test_a_request_waits_for_the_cheap_fleet_while_that_is_in_time_and_takes_the_dear_one_when_it_is_not() -> None:
    pool = fleets()
    pool.report("a", running=1, queued_prefill_tokens=24_000)
    pool.offer("r", PROMPT, ttft_target_s=3.0)
    assert pool.placed() == {}, "the cheap worker is predicted to have room in a second"
    pool.pass_time(1.0)
    pool.report("a", running=1, queued_prefill_tokens=60_000)
    pool.report("b")
    found = decision(pool)
    assert (found.fleet, found.reason) == ("dear", "meets")


def test_a_request_that_waits_for_the_dear_fleet_takes_the_cheap_one_when_that_frees_up() -> None:
    pool = fleets()
    pool.report("a", running=8, queued_prefill_tokens=240_000)
    pool.report("b", running=1, queued_prefill_tokens=24_000)
    pool.offer("r", PROMPT, ttft_target_s=3.0)
    assert pool.placed() == {}
    pool.pass_time(0.2)
    pool.report("a", running=0)
    found = decision(pool)
    assert (found.fleet, found.reason) == ("cheap", "cheapest")


def test_a_prefix_that_is_cached_in_the_cheap_fleet_makes_it_meet_the_target() -> None:
    for cached, expected in ((False, "dear"), (True, "cheap")):
        pool = fleets()
        pool.report("a", running=1, queued_prefill_tokens=700)
        if cached:
            pool.holds("a", PROMPT)
        pool.offer("r", PROMPT, ttft_target_s=0.5)
        assert decision(pool).fleet == expected


def test_a_worker_whose_report_is_old_is_not_taken_for_an_idle_one() -> None:
    pool = fleets()
    pool.pass_time(3.0)
    pool.report("b", running=4)
    pool.offer("r", PROMPT, ttft_target_s=1.0)
    found = decision(pool)
    assert (found.fleet, found.reason) == ("dear", "meets")
    assert {option.fleet: (option.state, option.ttft_s) for option in found.options}["cheap"] == ("unknown", -1.0)


def test_a_fleet_that_is_gone_leaves_its_requests_to_the_other() -> None:
    pool = fleets()
    pool.report("a", running=1, queued_prefill_tokens=24_000)
    pool.offer("r", PROMPT, ttft_target_s=3.0)
    assert pool.placed() == {}
    pool.scheduler.remove_worker("a", pool.now)
    placement = pool.placement()
    assert (placement.worker, placement.fleet) == ("b", None), "there is no choice any more"


def test_a_burst_fills_the_cheap_fleet_as_far_as_the_target_allows_and_then_the_dear_one() -> None:
    pool = fleets()
    for n in range(12):
        pool.offer(f"r{n}", chain(n + 1, 20), ttft_target_s=1.2)
    placed: dict[str, str] = {}
    for _ in range(100):
        placed |= pool.placed()
        pool.pass_time(0.05)
        for worker in "ab":
            load = next(load for load in pool.scheduler.pool.loads if load.info.worker == worker)
            tokens = int(max(load.pending_tokens(pool.now) - 0.05 * 24_000, 0))
            for request_id in list(load.entries):
                pool.event("started", request_id, worker)
            pool.report(worker, running=0, queued_prefill_tokens=tokens)
    assert len(placed) == 12
    assert set(placed.values()) == {"a", "b"}


def test_a_request_that_is_too_long_for_a_fleet_goes_to_another_even_if_that_is_late() -> None:
    pool = Pool("")
    pool.join("a", fleet="short", price=1.0, context=4096)
    pool.join("b", fleet="long", price=4.0, context=131_072)
    pool.report("a")
    pool.report("b")
    pool.offer("r", PROMPT, max_tokens=100, ttft_target_s=0.0)
    pool.offer("s", chain(2, 2), max_tokens=100, ttft_target_s=5.0)
    assert pool.placed() == {"r": "b", "s": "a"}


def test_a_pool_with_one_fleet_knows_nothing_of_targets() -> None:
    pool = Pool("ab")
    pool.offer("r", PROMPT, ttft_target_s=0.0)
    assert pool.placement().fleet is None


def test_what_is_said_of_a_decision_has_the_fleets_with_their_predictions() -> None:
    pool = fleets()
    pool.offer("r", PROMPT, name="mine")
    pool.placed()
    told = pool.scheduler.explain("mine", pool.now)
    assert told is not None
    assert told.fleet is not None
    assert [option.price for option in told.fleet.options] == [1.0, 4.0]
    assert all(option.ttft_s > 0 for option in told.fleet.options)


def gridded(data: dict[str, Any], **settings: Any) -> Pool:
    pool = Pool("", **settings)
    pool.scheduler = Scheduler(pool.scheduler.settings, pool.view, name="r1", grid=parse_grid(data))
    return pool


def test_a_grid_names_the_fleet_and_one_without_workers_fails_no_request() -> None:
    pool = gridded(AGG)
    for worker, fleet in (("a", "fast"), ("b", "middle"), ("c", "slow")):
        pool.join(worker, fleet=fleet)
        pool.report(worker)
    pool.offer("r", PROMPT, ttft_target_s=2.5, itl_target_s=0.09)
    found = decision(pool)
    assert (found.fleet, found.reason) == ("slow", "grid")
    pool.offer("s", PROMPT, ttft_target_s=2.5, itl_target_s=0.09, agent_priority=7)
    found = decision(pool)
    assert (found.fleet, found.reason) == ("fast", "override")
    pool.scheduler.remove_worker("c", pool.now)
    pool.offer("t", PROMPT, ttft_target_s=2.5, itl_target_s=0.09)
    found = decision(pool)
    assert found.fleet == "middle"


def test_a_request_that_failed_before_its_first_output_goes_to_the_next_faster_fleet_and_not_after_it() -> None:
    pool = gridded({**AGG, "enable_priority_retry": True})
    for worker, fleet in (("a", "fast"), ("b", "middle"), ("c", "slow")):
        pool.join(worker, fleet=fleet)
        pool.report(worker)
    pool.offer("r", PROMPT, ttft_target_s=2.5, itl_target_s=0.09, failures=1)
    found = decision(pool)
    assert (found.fleet, found.reason) == ("middle", "retry")
    pool.event("prefilled", "s", "c")
    pool.offer("s", PROMPT, ttft_target_s=2.5, itl_target_s=0.09, failures=1)
    found = decision(pool)
    assert (found.fleet, found.reason) == ("slow", "grid")


def test_a_grid_names_the_prefill_workers_of_a_prompt_as_well() -> None:
    pool = gridded(DISAGG, prefill="always")
    for worker, fleet in (("p", "p0"), ("q", "p1")):
        pool.join(worker, role="prefill", handover="sim", fleet=fleet)
    for worker, fleet in (("d", "d0"), ("e", "d1")):
        pool.join(worker, role="decode", handover="sim", fleet=fleet)
    for worker in "pqde":
        pool.report(worker)
    pool.offer("r", tokens=2 * BLOCK, ttft_target_s=0.9, itl_target_s=0.01)
    placement = pool.placement()
    assert placement.worker == "d"
    assert placement.prefill is not None
    assert placement.prefill.remote
    assert placement.prefill.worker == "q"
    pool.scheduler.remove_worker("q", pool.now)
    pool.offer("s", tokens=2 * BLOCK, ttft_target_s=0.9, itl_target_s=0.01)
    again = pool.placement()
    assert again.prefill is not None
    assert again.prefill.remote, "what a grid names is no filter"


def test_the_speed_of_one_fleet_says_nothing_of_another() -> None:
    pool = fleets()
    for n in range(6):
        pool.report("a", running=1, step_s=0.2 + 0.001 * n, step_decodes=1)
        pool.report("b", running=1, step_s=0.01 + 0.0001 * n, step_decodes=1)
    pool.offer("r", PROMPT, ttft_target_s=60.0, itl_target_s=0.05)
    found = decision(pool)
    assert (found.fleet, found.reason) == ("dear", "meets")
    itl = {option.fleet: option.itl_s for option in found.options}
    assert itl["cheap"] > 0.1
    assert itl["dear"] < 0.03


def test_a_policy_without_fleets_says_so() -> None:
    pool = fleets(policy="round-robin")
    pool.offer("r", PROMPT)
    assert decision(pool).reason == "policy"
