"""The state of an engine by its last report, and what that says of a prompt that is placed on it."""

from __future__ import annotations

import random
from dataclasses import replace
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.events import JobEvent
from headrace.router.index.types import NO_OVERLAP
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.disagg_planner import DisaggPlan
from headrace.router.placement.first_tokens import (
    ASKED_S,
    LEAST_WAY_S,
    MOST_ALIKE,
    MOST_FACTOR,
    MOST_OPEN,
    EngineNow,
    FirstTokens,
    Medians,
    bucket_of,
    engine_now,
    until_computed_s,
    until_last_step_s,
)
from headrace.router.placement.load import WorkerLoad
from headrace.router.placement.settings import CalibrationSettings, SchedulerSettings
from headrace.router.placement.types import Waiting
from headrace.tools.replay_bench.engine import EngineModel, ReplayFleet
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.trace import SAMPLE, read_trace
from headrace.tools.replay_bench.world import Delays, ReplayOutcome, World
from tests.support.router.reported_worker import SPEED, loads


def test_an_idle_engine_takes_a_step_with_the_prompt() -> None:
    _, load = loads(running=0)
    assert until_computed_s(engine_now(load, 0.0), 1000) == pytest.approx(0.1 + 0.01)


def test_a_prompt_waits_for_the_rest_of_the_step_that_runs_and_not_for_all_of_it() -> None:
    _, load = loads(running=1, step_s=0.9, step_prefill_tokens=8192, queued_prefill_tokens=4096)
    assert engine_now(load, 0.0).running_s == pytest.approx(0.45)
    assert engine_now(load, 0.25).running_s == pytest.approx(0.2)


def test_prompts_that_no_step_has_begun_with_are_before_it() -> None:
    _, load = loads(running=2, waiting=1, step_s=0.9, step_prefill_tokens=8192, queued_prefill_tokens=8192 + 3000)
    load.place("other", tokens=500, blocks=1, now_s=0.0)
    now = engine_now(load, 0.0)
    assert (now.before, now.state) == (3500.0, "filling")
    steps = 0.9 + (3500 + 9000) / 10_000 + 2 * (0.01 + 3 * 0.001)
    assert until_computed_s(now, 9000) == pytest.approx(steps)


def test_half_of_a_step_that_only_decodes_is_left() -> None:
    _, load = loads(running=3, step_s=0.02, step_decodes=3)
    now = engine_now(load, 5.0)
    assert (now.running_s, now.state) == (0.01, "decoding")


def test_of_a_worker_without_a_report_only_what_was_placed_is_known() -> None:
    _, load = loads()
    load.place("other", tokens=500, blocks=1, now_s=0.0)
    assert engine_now(load, 1.0).before == 500.0


@given(
    st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 8192), st.floats(0, 10), st.integers(0, 64), st.floats(0, 100)
)
def test_whatever_is_reported_a_prediction_is_finite_and_longer_prompts_never_come_sooner(
    tokens: int, queued: int, in_step: int, step_s: float, running: int, now_s: float
) -> None:
    _, load = loads(running=running, step_s=step_s, step_prefill_tokens=in_step, queued_prefill_tokens=queued)
    now = engine_now(load, now_s)
    shorter, longer = until_computed_s(now, max(tokens, 1)), until_computed_s(now, tokens + 100)
    assert isfinite(longer)
    assert 0.0 < shorter <= longer


@given(st.floats(0.0, 100.0), st.floats(0.0, 1e5), st.floats(1.0, 1e5))
def test_more_before_it_never_makes_a_prompt_sooner(running_s: float, before: float, tokens: float) -> None:
    now = EngineNow(running_s=running_s, before=before, step_s=0.01, token_s=1e-4, step_tokens=8192.0, slot_wait_s=0.0)
    assert until_computed_s(now._replace(before=before + 100.0), tokens) >= until_computed_s(now, tokens)
    assert until_computed_s(now._replace(running_s=running_s + 1.0), tokens) >= until_computed_s(now, tokens)


def test_of_steps_that_only_decode_the_end_of_one_tells_when_the_next_end() -> None:
    _, load = loads(running=3, step_s=0.02, step_decodes=3)
    at_s = 1.0 + 4 * 0.02
    assert engine_now(load, at_s + 0.003, ended_s=1.0).running_s == pytest.approx(0.017)
    assert engine_now(load, at_s + 0.017, ended_s=1.0).running_s == pytest.approx(0.003)
    now = engine_now(load, at_s + 0.017, ended_s=1.0, way_s=0.005)
    assert now.running_s == pytest.approx(0.018), "it comes after that step"
    assert engine_now(load, 1.0 + (MOST_ALIKE + 1) * 0.02, ended_s=1.0).running_s == 0.01, "too many steps ago"


def test_what_a_report_tells_was_so_when_it_was_sent() -> None:
    _, load = loads(running=1, step_s=0.9, step_prefill_tokens=8192, queued_prefill_tokens=4096)
    now = engine_now(load, 0.1, way_s=0.02)
    assert now.running_s == pytest.approx(0.45 - 0.1 - 2 * 0.02)
    assert until_computed_s(now, 1000) == pytest.approx(0.45 - 0.02 - 0.1 + 0.1 + 0.011)


def test_a_queue_that_was_reported_is_in_the_step_that_runs_once_the_one_before_has_ended() -> None:
    _, load = loads(running=3, waiting=1, step_s=0.02, step_decodes=3, queued_prefill_tokens=4000)
    step_s = 4000 / 10_000 + 0.01 + 3 * 0.001
    assert engine_now(load, 0.005)[:2] == pytest.approx((0.005, 4000.0))
    assert engine_now(load, 0.1)[:2] == pytest.approx((0.01 + step_s - 0.1, 0.0))
    assert engine_now(load, 1.0).state == "decoding"
    assert engine_now(load, 1.0).running_s < 0.02


def test_a_long_queue_takes_several_steps() -> None:
    _, load = loads(running=1, step_s=0.02, step_decodes=1, queued_prefill_tokens=20_000)
    step_s = 8192 / 10_000 + 0.01 + 0.001
    assert engine_now(load, 1.0)[:2] == pytest.approx((0.01 + 2 * step_s - 1.0, 20_000 - 2 * 8192))


def test_what_was_placed_and_has_arrived_is_in_the_step_that_began_after_that() -> None:
    _, load = loads(running=0)
    load.place("other", tokens=2000, blocks=1, now_s=1.0)
    assert engine_now(load, 1.0)[:2] == (0.0, 2000.0)
    now = engine_now(load, 1.05)
    assert now[:2] == pytest.approx((0.2 + 0.011 - 0.05, 0.0))
    load.place("late", tokens=300, blocks=1, now_s=1.05)
    assert engine_now(load, 1.1).before == 300.0, "it waits for the next one"


def test_a_report_of_long_ago_ends_the_same_way() -> None:
    _, load = loads(running=1, step_s=0.02, step_decodes=1, queued_prefill_tokens=10**8)
    now = engine_now(load, 1e6)
    assert isfinite(until_computed_s(now, 100.0))
    assert now.before > 0


def test_a_prompt_of_several_steps_can_be_joined_until_its_last_one_begins() -> None:
    now = EngineNow(running_s=0.5, before=0.0, step_s=0.01, token_s=1e-4, step_tokens=8192.0, slot_wait_s=0.0)
    assert until_last_step_s(now, 8192.0) == 0.5
    assert until_last_step_s(now, 8193.0) == pytest.approx(0.5 + 0.8192 + 0.01)
    assert until_last_step_s(now, 20_000.0) < until_computed_s(now, 20_000.0)


BUCKET = bucket_of("a", 100, "idle")


def test_an_error_that_keeps_its_size_is_learnt_of_its_own_bucket_alone() -> None:
    medians = Medians()
    for _ in range(60):
        medians.observe(BUCKET, predicted_s=1.0, measured_s=1.5)
    assert medians.factor(BUCKET) == pytest.approx(1.5, rel=0.05)
    assert medians.factor(BUCKET._replace(state="filling")) == 1.0
    assert medians.factor(BUCKET._replace(fleet="b")) == 1.0
    assert medians.factor(bucket_of("a", 100_000, "idle")) == 1.0


def test_a_median_is_learnt_and_no_mean() -> None:
    medians, rng = Medians(), random.Random(1)
    for _ in range(2000):
        medians.observe(BUCKET, predicted_s=1.0, measured_s=100.0 if rng.random() < 0.2 else 1.1)
    assert medians.factor(BUCKET) == pytest.approx(1.1, rel=0.15)


times = st.floats() | st.sampled_from([0.0, -1.0, float("inf"), float("nan"), 1e-300, 1e300])


@given(st.lists(st.tuples(times, times), max_size=60))
def test_whatever_is_measured_a_factor_stays_within_its_bounds(seen: list[tuple[float, float]]) -> None:
    medians = Medians()
    for predicted_s, measured_s in seen:
        medians.observe(BUCKET, predicted_s=predicted_s, measured_s=measured_s)
    assert 1 / MOST_FACTOR - 1e-9 <= medians.factor(BUCKET) <= MOST_FACTOR + 1e-9


HERE = DisaggPlan(None, 0.0, 0.0)


def predicted(first: FirstTokens, load: WorkerLoad, number: int, now_s: float) -> float:
    return first.predict(Waiting(id=str(number), tokens=1000), load, HERE, NO_OVERLAP, now_s)


def test_predictions_learn_from_the_events_of_workers_and_forget_what_has_ended() -> None:
    table, load = loads(running=0)
    first = FirstTokens(table, SchedulerSettings())
    assert predicted(first, load, 0, 0.0) == pytest.approx(0.11 + LEAST_WAY_S)
    first.on_event(JobEvent("settled", "0", 1, "w"), 9.0)
    for number in range(1, 60):
        predicted(first, load, number, float(number))
        first.on_event(JobEvent("prefilled", str(number), 1, "w"), number + 0.22)
    assert len(first) == 0
    assert predicted(first, load, 60, 60.0) == pytest.approx(0.22, rel=0.05)


def test_what_is_learnt_of_a_fleet_whose_speed_is_assumed_is_forgotten_when_that_is_known() -> None:
    table, load = loads(running=0)
    first = FirstTokens(
        table, SchedulerSettings(calibration=CalibrationSettings(prefill_tokens_per_s=SPEED.prefill_tokens_per_s))
    )
    for number in range(8):
        predicted(first, load, number, float(number))
        first.on_event(JobEvent("prefilled", str(number), 1, "w"), number + 0.22)
    assert predicted(first, load, 8, 8.0) == pytest.approx(0.22, rel=0.1), "few requests are enough"
    load.speed = SpeedEstimate(0.01, 5_000.0, 0.001)
    assert predicted(first, load, 9, 9.0) == pytest.approx(0.21 + LEAST_WAY_S)


def test_predictions_that_are_never_confirmed_are_forgotten() -> None:
    table, load = loads(running=0)
    first = FirstTokens(table, SchedulerSettings())
    for number in range(MOST_OPEN + 50):
        predicted(first, load, number, 0.0)
    assert len(first) == MOST_OPEN


def test_a_request_that_asks_for_no_time_is_told_none_in_a_pool_with_one_fleet() -> None:
    table, load = loads(running=0)
    first, plan = FirstTokens(table, SchedulerSettings()), DisaggPlan(None, 3.0, 4.0)
    assert first.foresee(Waiting(id="1", tokens=1000), load, plan, NO_OVERLAP, 0.0) is plan
    asked = Waiting(id="2", tokens=1000, ttft_target_s=0.5)
    assert first.foresee(asked, load, plan, NO_OVERLAP, 0.0).service_s == pytest.approx(0.11 + LEAST_WAY_S)
    assert (len(first), len(first.promises)) == (1, 1)


def test_placements_of_other_routers_are_promised_where_requests_ask_for_a_time() -> None:
    table, load = loads(running=0)
    first = FirstTokens(table, SchedulerSettings())
    placed = JobEvent("placed", "1", 1, "w", tokens=1000, by="other")
    first.placed_elsewhere(placed, 0.0)
    assert not first.promises
    first.foresee(Waiting(id="2", tokens=1000, ttft_target_s=0.5), load, HERE, NO_OVERLAP, 1.0)
    first.placed_elsewhere(placed, 1.0)
    assert len(first.promises) == 2
    first.promises.slack(9.0)
    first.placed_elsewhere(placed, 2.0 + ASKED_S)
    assert not first.promises


def test_events_of_a_worker_tell_when_its_steps_end_until_it_leaves() -> None:
    table, load = loads(running=2, step_s=0.02, step_decodes=2)
    first = FirstTokens(table, SchedulerSettings())
    half = predicted(first, load, 1, 5.015)
    first.on_event(JobEvent("settled", "other", 1, "w"), 5.0)
    assert predicted(first, load, 2, 5.015) == pytest.approx(half - 0.01 + 0.005, abs=3 * LEAST_WAY_S)
    first.remove_worker("w")
    assert predicted(first, load, 3, 5.015) == pytest.approx(half)


def test_what_messages_take_is_learnt_from_requests_that_start() -> None:
    table, load = loads(running=0)
    first = FirstTokens(table, SchedulerSettings())
    told = []
    for number in range(200):
        at_s = 10.0 * number
        told.append(predicted(first, load, number, at_s))
        first.on_event(JobEvent("started", str(number), 1, "w"), at_s + 0.04)
        first.on_event(JobEvent("prefilled", str(number), 1, "w"), at_s + 0.02 + 0.11 + 0.02)
    assert told[-1] == pytest.approx(0.11 + 0.02, rel=0.1), "the answer is not yet on its way back"


def within_a_fifth(outcomes: list[ReplayOutcome]) -> float:
    took_s = [one.job.first_s - one.job.request.at_s for one in outcomes]
    close = [abs(one.predicted_ttft_s - took) <= 0.2 * took for one, took in zip(outcomes, took_s, strict=True)]
    assert len(close) > 100
    return sum(close) / len(close)


@pytest.mark.parametrize("way_s", [0.001, 0.005])
def test_nine_of_ten_first_tokens_of_one_fleet_are_predicted_to_within_a_fifth_where_requests_ask_for_a_time(
    way_s: float,
) -> None:
    """Modelled engines, the real scheduler, requests of a recorded trace; messages may take long."""
    trace = read_trace(SAMPLE)
    asking = replace(trace, requests=tuple(replace(one, ttft_target_s=2.0) for one in trace.requests))
    fleets = (ReplayFleet(workers=4, model=EngineModel(blocks=4_000)),)
    policy = Policy(name="kv", settings={"limits.hopeless": False})
    delays = Delays(place_s=way_s, event_s=way_s)
    outcomes = World(trace=asking, fleets=fleets, make_router=policy.router, delays=delays).run()
    assert within_a_fifth(outcomes) >= 0.9


def test_nine_of_ten_first_tokens_of_two_fleets_are_predicted_to_within_a_fifth() -> None:
    """Modelled engines of two speeds, the real scheduler, requests of a recorded trace."""
    slow = EngineModel(blocks=2_000, prefill_rate=8_000.0, base_s=0.016)
    quick = EngineModel(blocks=8_000, slots=256, prefill_rate=24_000.0, decode_s=0.000_03)
    fleets = (
        ReplayFleet(name="slow", price=1.0, workers=4, model=slow),
        ReplayFleet(name="quick", price=4.0, workers=2, model=quick),
    )
    policy = Policy(name="kv", settings={"limits.hopeless": False})
    outcomes = World(trace=read_trace(SAMPLE), fleets=fleets, make_router=policy.router).run()
    assert within_a_fifth(outcomes) >= 0.9
