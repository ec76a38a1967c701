"""The preference among fleets, as a pure function of predictions."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.placement.fleets.choice import LATE, MEETS, UNKNOWN, Asker, FleetState, Forecast, Preference, prefer
from headrace.router.placement.fleets.targets import Targets

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
