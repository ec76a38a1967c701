"""Waiting jobs start by class, then by the tenants' shares, then by what is due first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.durable.carrier.held_job import HeldJob
from headrace.broker.durable.carrier.waiting_jobs import RANKS, WaitingJobs
from tests.unit.broker.durable.carrier.test_held_job import held

CLASSES = ("hi", "std", "batch")


@given(
    st.lists(st.tuples(st.sampled_from(CLASSES), st.sampled_from("abc"), st.sampled_from([1.0, 2.0, 3.0])), max_size=12),
    st.data(),
)
def test_the_order_is_that_of_a_search_through_all_of_them(wishes: list[tuple[str, str, float]], data: st.DataObject) -> None:
    """Jobs are removed in between; a share grows with each start."""
    waiting, left, started = WaitingJobs(), dict[int, HeldJob](), Counter[str]()
    for seq, (request_class, tenant, deadline) in enumerate(wishes):
        left[seq] = held(seq, tenant=tenant, request_class=request_class, deadline=deadline)
        waiting.add(left[seq])
    while left:
        if data.draw(st.booleans()):
            gone = left.pop(data.draw(st.sampled_from(sorted(left))))
            waiting.remove(gone)
            waiting.remove(gone)
            continue
        expected = min(left.values(), key=lambda h: (RANKS[h.job.request_class], started[h.job.tenant], h.job.deadline, h.seq))
        assert waiting.take(started) is expected
        assert len(waiting) == len(left) - 1
        del left[expected.seq]
        started[expected.job.tenant] += 1
    assert waiting.take(started) is None


def test_a_job_of_the_same_sequence_replaces_one_that_was_removed() -> None:
    waiting, before, other, after = WaitingJobs(), held(1), held(2), held(1)
    waiting.add(other)
    waiting.add(before)
    waiting.remove(before)
    waiting.add(after)
    assert waiting.take({}) is after
    assert waiting.take({}) is other
    assert waiting.take({}) is None


def waiting_of(*jobs: HeldJob) -> WaitingJobs:
    waiting = WaitingJobs()
    for job in jobs:
        waiting.add(job)
    return waiting


def test_jobs_start_by_class_then_share_then_deadline() -> None:
    late, soon = held(1, deadline=90.0), held(2, deadline=50.0)
    urgent, other = held(3, request_class="std", deadline=99.0), held(4, tenant="u", deadline=80.0)
    assert waiting_of(late, soon, urgent, other).take({}) is urgent
    assert waiting_of(late, soon, other).take({}) is soon
    assert waiting_of(late, soon, other).take({"t": 1}) is other
    assert waiting_of().take({}) is None
