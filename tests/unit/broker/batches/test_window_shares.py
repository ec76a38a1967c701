"""Batches share what may wait by how urgent they are."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.batches.record import BatchRecord, LineCounts
from headrace.broker.batches.window_shares import LEAST_OUT, lines_out, shares
from tests.unit.broker.batches.test_states import record

HOUR = 3600


def batch(total: int, ends: int, done: int = 0) -> BatchRecord:
    return record("in_progress", counts=LineCounts(total=total, completed=done), expires_at=ends)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(-100, 100_000)), max_size=8), st.integers(1, 2000))
def test_shares_fill_the_window_and_no_batch_is_left_out(facts: list[tuple[int, int]], window: int) -> None:
    batches = [batch(total, ends) for total, ends in facts]
    given_ = shares(batches, window, 0.0)
    open_ = {b.id: b.counts.open for b in batches if b.counts.open}
    assert given_.keys() == open_.keys()
    assert all(1 <= given_[i] <= open_[i] for i in given_)
    assert sum(given_.values()) <= max(window, len(given_))
    assert sum(given_.values()) >= min(window, sum(open_.values()))


def test_of_two_batches_alike_the_one_that_ends_first_gets_more() -> None:
    soon, late = batch(1000, 1800), batch(1000, 24 * HOUR)
    found = shares([late, soon], 100, 0.0)
    assert found[soon.id] > 5 * found[late.id]


def test_a_batch_alone_gets_all() -> None:
    only = batch(1000, HOUR)
    assert shares([only], 64, 0.0) == {only.id: 64}


def test_the_part_that_a_small_batch_does_not_need_goes_to_the_others() -> None:
    small, large = batch(3, 600), batch(10_000, HOUR)
    assert shares([small, large], 100, 0.0) == {small.id: 3, large.id: 97}


def test_three_windows_all_meet_their_deadlines_where_the_work_fits() -> None:
    """Lines per second are shared as the window is. All three need 90 percent of the capacity until the first deadline."""
    batches = {b.id: b for b in (batch(9000, 1800), batch(9000, 2 * HOUR), batch(9000, 24 * HOUR))}
    rate = (9000 / 1800 + 9000 / (2 * HOUR) + 9000 / (24 * HOUR)) / 0.9
    left = {i: float(b.counts.open) for i, b in batches.items()}
    ended: dict[str, float] = {}
    for now in range(0, 24 * HOUR, 10):
        if len(ended) == 3:
            break
        now_open = [
            msgspec.structs.replace(b, counts=LineCounts(total=9000, completed=9000 - max(1, int(left[i]))))
            for i, b in batches.items()
            if i not in ended
        ]
        found = shares(now_open, 64, now)
        for i, part in found.items():
            left[i] -= rate * 10 * part / sum(found.values())
            if left[i] <= 0:
                ended[i] = now
    assert all(ended[i] <= b.expires_at for i, b in batches.items())


def test_no_more_lines_are_out_than_the_workers_of_the_model_can_use_soon() -> None:
    assert lines_out(64, 1024) == 256
    assert lines_out(4096, 1024) == 1024
    assert lines_out(0, 1024) == LEAST_OUT, "workers that are gone for a moment find lines when they are back"
    assert lines_out(64, 8) == 8
