"""A worker that died is due back for a short time, or until another one comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.placement.pool import SLOW_START_S, WAIT_S, LostWorkers, due_back_s


def test_a_lost_worker_is_due_back_until_its_time_is_over() -> None:
    lost = LostWorkers()
    assert not lost.due(10.0)
    lost.lose(10.0)
    lost.lose(11.0)
    assert [lost.due(at) for at in (11.0, 10.0 + WAIT_S, 11.0 + WAIT_S)] == [2, 1, 0]


@pytest.mark.parametrize(
    ("start_s", "due_s"), [(0.0, WAIT_S), (1.2, WAIT_S), (SLOW_START_S, WAIT_S), (SLOW_START_S + 0.1, 0.0)]
)
def test_a_worker_is_waited_for_unless_its_start_takes_long(start_s: float, due_s: float) -> None:
    assert due_back_s(start_s) == pytest.approx(due_s)
    lost = LostWorkers()
    lost.lose(10.0, start_s)
    assert [lost.due(10.0), lost.due(10.0 + WAIT_S)] == [int(due_s > 0), 0]


def test_a_new_worker_makes_up_for_a_lost_one_and_for_none_that_is_lost_later() -> None:
    lost = LostWorkers()
    lost.join()
    lost.lose(10.0)
    assert lost.due(10.0)
    lost.join()
    assert not lost.due(10.0)


@given(st.lists(st.one_of(st.none(), st.floats(0.0, 2.0)), max_size=40))
def test_never_more_are_due_than_were_lost_in_that_time(steps: list[float | None]) -> None:
    """`steps`: a new worker (None), or the time that passes before one is lost."""
    lost, now, times = LostWorkers(), 0.0, []
    for step in steps:
        if step is None:
            lost.join()
        else:
            now += step
            lost.lose(now)
            times.append(now)
        assert lost.due(now) <= sum(now - at < WAIT_S for at in times)
