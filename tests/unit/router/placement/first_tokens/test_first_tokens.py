"""Predictions of first tokens, to whom they are told, and what they learn from events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.broker.messages import JobEvent
from headrace.router.index.types import NO_OVERLAP
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.disagg_planner import DisaggPlan
from headrace.router.placement.first_tokens.first_tokens import ASKED_S, LEAST_WAY_S, MOST_OPEN, FirstTokens
from headrace.router.placement.load import WorkerLoad
from headrace.router.placement.settings import CalibrationSettings, SchedulerSettings
from headrace.router.placement.types import Waiting
from headrace.tools.replay_bench.engine import EngineModel, ReplayFleet
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.trace import SAMPLE, read_trace
from headrace.tools.replay_bench.world import Delays, ReplayOutcome, World
from tests.support.router.reported_worker import SPEED, loads

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
