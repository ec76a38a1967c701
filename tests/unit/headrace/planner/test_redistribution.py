from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.redistribution import ROOM, fits, most_leaving, victims
from tests.support.planner_sights import worker


def test_none_leaves_whose_work_does_not_fit_on_the_rest() -> None:
    full = [worker("a", running=28), worker("b", running=28)]
    assert not fits(full, 1, waiting=0, sequences=100)
    assert most_leaving(full, 1, waiting=0, sequences=100) == 0
    assert most_leaving([worker("a", running=10), worker("b", running=10)], 1, waiting=0, sequences=100) == 1


def test_the_kv_cache_must_hold_it_too() -> None:
    full = [worker("a", running=1, kv_used=0.6), worker("b", running=1, kv_used=0.6)]
    assert not fits(full, 1, waiting=0, sequences=100)


def test_what_waits_counts() -> None:
    idle = [worker("a"), worker("b")]
    assert fits(idle, 1, waiting=0, sequences=100)
    assert not fits(idle, 1, waiting=40, sequences=100)


def test_a_load_that_nobody_knows_is_not_zero() -> None:
    assert not fits([worker("a"), worker("b", report_age_s=None)], 1, waiting=0, sequences=100)


def test_the_last_one_leaves_only_with_empty_hands() -> None:
    assert not fits([worker("a", running=1)], 0, waiting=0, sequences=100)
    assert not fits([worker("a")], 0, waiting=1, sequences=100)
    assert fits([worker("a")], 0, waiting=0, sequences=100)


def test_victims_hold_the_least_work() -> None:
    some = [worker("a", running=5), worker("b", running=1, waiting=1), worker("c", running=2, kv_used=0.5)]
    assert [one.worker for one in victims(some, 2)] == ["b", "c"]


@given(st.lists(st.integers(0, 32), min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 60), st.integers(1, 64))
def test_whatever_leaves_the_rest_has_room(running: list[int], leave: int, waiting: int, sequences: int) -> None:
    workers = [worker(f"w{i}", running=n) for i, n in enumerate(running)]
    gone = most_leaving(workers, leave, waiting=waiting, sequences=sequences)
    rest = len(workers) - gone
    assert 0 <= gone <= leave
    if gone:
        assert sum(running) + waiting <= ROOM * rest * min(32, sequences)
