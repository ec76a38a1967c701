from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planner.capacity import Capacity, Targets
from headrace.planner.observation import OutcomeSight
from headrace.planner.peak_keeper import MARGIN, PeakKeeper, Rehearsal

ONE = Capacity(per_s=4.0, sequences=16, slack_s=3.0)
TARGETS = Targets(ttft_s=4.0, itl_s=0.25)


def keeper() -> PeakKeeper:
    return PeakKeeper(TARGETS, season_s=86_400.0)


def pass_steps(some: PeakKeeper, rate: float | None, count: int, *, start_s: float) -> None:
    for _ in range(count):
        some.note(rate, ONE, step_s=5.0, start_s=start_s, most=20)


def end(some: PeakKeeper, *, late: int, others: int) -> None:
    """Have so many requests end late, one half at the first token and one between tokens, and so many in time."""
    some.note_ended([OutcomeSight(ttft_s=9.0)] * (late // 2) + [OutcomeSight(ttft_s=0.1, itl_s=9.0)] * (late - late // 2))
    some.note_ended([OutcomeSight(ttft_s=0.1)] * others)


def bursts(some: PeakKeeper, *, start_s: float, late: int = 40) -> None:
    """Pass two hours with a burst in each that rises within two minutes, and so many late ones of 2,000 requests."""
    end(some, late=late, others=2000 - late)
    for _ in range(2):
        pass_steps(some, 1.0, 480, start_s=start_s)
        for step in range(24):
            pass_steps(some, 1.0 + 11.0 * step / 24, 1, start_s=start_s)
        pass_steps(some, 12.0, 120, start_s=start_s)


def test_the_peak_is_kept_where_bursts_come_sooner_than_workers_and_not_where_these_are_quick() -> None:
    slow, quick = keeper(), keeper()
    bursts(slow, start_s=300.0)
    bursts(quick, start_s=10.0)
    assert slow.rate == pytest.approx(MARGIN * 12.0)
    assert quick.rate == 0.0


def test_bursts_that_forecasts_foresee_keep_nothing() -> None:
    some = keeper()
    bursts(some, start_s=300.0, late=15)
    assert some.rate == 0.0


def test_many_requests_that_really_are_late_are_enough_and_keeping_ends_long_after() -> None:
    some = keeper()
    pass_steps(some, 3.0, 10, start_s=10.0)
    end(some, late=62, others=1938)
    pass_steps(some, 3.0, 1, start_s=10.0)
    assert some.keeping
    end(some, late=0, others=16_000)
    pass_steps(some, 3.0, 1, start_s=10.0)
    assert some.keeping, "a ninth of the limit"
    end(some, late=0, others=4000)
    pass_steps(some, 3.0, 1, start_s=10.0)
    assert not some.keeping


def test_a_few_late_requests_say_nothing() -> None:
    some = keeper()
    some.note_ended([OutcomeSight(ttft_s=9.0)] * 29)
    pass_steps(some, 1.0, 5, start_s=10.0)
    assert not some.keeping


def test_a_peak_is_forgotten_after_a_day() -> None:
    some = keeper()
    bursts(some, start_s=300.0)
    pass_steps(some, 2.0, 25 * 720, start_s=300.0)
    some.keeping = True
    assert some.rate == pytest.approx(MARGIN * 2.0)


def test_an_unknown_step_changes_nothing() -> None:
    some = keeper()
    bursts(some, start_s=300.0)
    before = some.dump()
    pass_steps(some, None, 10, start_s=300.0)
    assert some.dump() == before


def test_what_is_stored_is_taken_over() -> None:
    some, other = keeper(), keeper()
    bursts(some, start_s=300.0)
    other.load(**some.dump())  # type: ignore[arg-type]
    assert other.rate == some.rate > 0
    for one in (some, other):
        bursts(one, start_s=300.0)
    assert other.rate == some.rate
    assert other.dump() == some.dump()
    with pytest.raises(ValueError, match="no peak"):
        other.load(**{**some.dump(), "peaks": []})  # type: ignore[arg-type]


def test_in_the_rehearsal_workers_come_a_start_up_after_the_load_and_leave_two_later() -> None:
    pool = Rehearsal()
    for _ in range(4):
        pool.step(10.0, 3, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 1
    pool.step(10.0, 3, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 3
    for _ in range(3):
        pool.step(1.0, 1, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 3, "two start-ups are not over"
    pool.step(1.0, 1, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 1
    assert pool.late == 0.0


def test_a_rehearsal_that_begins_amid_the_load_calls_nothing_late_before_it_has_its_workers() -> None:
    some = keeper()
    pass_steps(some, 12.0, 1000, start_s=100.0)
    assert not some.keeping


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1e4)), max_size=60), st.floats(1, 1000), st.integers(1, 30))
def test_whatever_arrives_the_kept_load_is_none_or_a_little_above_the_highest(
    rates: list[float | None], start_s: float, most: int
) -> None:
    some = keeper()
    for rate in rates:
        some.note(rate, ONE, step_s=5.0, start_s=start_s, most=most)
        highest = max((one for one in rates if one is not None), default=0.0)
        assert 0.0 <= some.rate <= MARGIN * highest * (1 + 1e-9)
        if not some.keeping:
            assert some.rate == 0.0
