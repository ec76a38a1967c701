from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.batch_deadlines import batch_workers, required

backlogs = st.lists(st.tuples(st.floats(-100, 1e5), st.integers(0, 10_000)), max_size=10)


def test_the_tightest_deadline_counts_with_all_that_is_due_before_it() -> None:
    # 100 in 110 s and 1000 in 1010 s, with 10 s to start and one a second: 1.0 and 1.1
    assert required([(110, 100), (1010, 1000)], per_s=1.0, start_s=10) == 1.1


def test_work_sleeps_until_it_is_worth_a_start() -> None:
    assert batch_workers([(1000, 400)], per_s=1.0, start_s=0, awake=False) == 0
    assert batch_workers([(1000, 400)], per_s=1.0, start_s=0, awake=True) == 1
    assert batch_workers([(1000, 900)], per_s=1.0, start_s=0, awake=False) == 1


def test_work_that_is_late_already_is_finite() -> None:
    assert batch_workers([(-5, 10)], per_s=1.0, start_s=60, awake=True) == 10


def test_no_backlog_needs_nobody() -> None:
    assert batch_workers([], per_s=1.0, start_s=60, awake=True) == 0


@given(backlogs, st.floats(0.01, 100), st.floats(0, 600))
def test_those_that_are_required_meet_every_deadline(backlog: list[tuple[float, int]], per_s: float, start_s: float) -> None:
    workers = batch_workers(backlog, per_s=per_s, start_s=start_s, awake=True)
    done = 0
    for left_s, count in sorted(backlog):
        done += count
        assert done <= workers * per_s * max(left_s - start_s, 1.0) * (1 + 1e-6) + 1e-6
