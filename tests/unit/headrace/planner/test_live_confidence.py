from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.capacity import Targets
from headrace.planner.live_confidence import AIM, HIGHEST, LOWEST, MOST_UP, LiveConfidence
from headrace.planner.observation import OutcomeSight

TARGETS = Targets(ttft_s=2.0, itl_s=0.1, miss=0.01)
GOOD = OutcomeSight(ttft_s=1.0, itl_s=0.05)
LATE = OutcomeSight(ttft_s=2.5, itl_s=0.05)
SLOW = OutcomeSight(ttft_s=1.0, itl_s=0.2)


def confidence(first: float = 0.8, *, moves: bool = True, targets: Targets = TARGETS) -> LiveConfidence:
    return LiveConfidence(first, targets, moves=moves)


def test_requests_that_are_late_or_slow_make_it_higher_and_none_makes_it_lower() -> None:
    for missed in (LATE, SLOW):
        some = confidence()
        for _ in range(50):
            some.note([missed, *[GOOD] * 19])
        assert some.value > 0.82
    some = confidence()
    for _ in range(500):
        some.note([GOOD] * 20)
    assert some.value < 0.75


def test_it_stays_where_as_many_are_late_as_it_aims_at() -> None:
    some, rng = confidence(), random.Random(1)
    for _ in range(2000):
        some.note([LATE if rng.random() < AIM * TARGETS.miss else GOOD for _ in range(10)])
    assert abs(some.value - 0.8) < 0.05


def test_it_settles_where_fewer_are_late_than_may_be() -> None:
    """A load of which a share of 10 % and more is late below 0.9, and hardly anything above."""
    some, rng, late = confidence(0.6), random.Random(2), 0
    for look in range(6000):
        share = 0.1 * max(0.0, 0.9 - some.value)
        ended = [LATE if rng.random() < share else GOOD for _ in range(10)]
        late += ended.count(LATE) if look >= 3000 else 0
        some.note(ended)
    assert late / 30_000 < TARGETS.miss
    assert 0.75 < some.value < 0.9


def test_a_burst_adds_no_more_than_one_look_may() -> None:
    some = confidence()
    some.note([LATE] * 500)
    assert some.value <= 0.8 + MOST_UP + 1e-9


def test_where_more_may_be_late_it_takes_more_of_them() -> None:
    strict, lenient = confidence(), confidence(targets=Targets(ttft_s=2.0, itl_s=0.1, miss=0.1))
    for _ in range(100):
        for some in (strict, lenient):
            some.note([LATE, *[GOOD] * 29])
    assert strict.value > 0.8
    assert lenient.value < 0.8


def test_one_that_does_not_move_is_what_was_set() -> None:
    some = confidence(0.85, moves=False)
    assert not some.note([LATE] * 100)
    some.load(0.6)
    assert some.value == 0.85


@given(
    st.floats(0.5, 0.999),
    st.lists(st.lists(st.sampled_from([GOOD, LATE, SLOW]), max_size=40), max_size=300),
)
def test_it_never_leaves_its_bounds_and_says_when_it_changes(first: float, looks: list[list[OutcomeSight]]) -> None:
    some = confidence(first)
    for ended in looks:
        before = some.value
        changed = some.note(ended)
        assert changed == (some.value != before)
        assert min(LOWEST, first) <= some.value <= max(HIGHEST, first)


def test_a_stored_value_is_taken_over_and_one_that_cannot_be_is_not() -> None:
    some = confidence()
    some.load(0.9)
    assert some.value == 0.9
    for wrong in (0.0, 1.5, float("nan")):
        some.load(wrong)
        assert some.value == 0.9
