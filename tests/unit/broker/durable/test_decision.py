"""Decisions about a stored job: whose it is, when it is poison, what the end of a run means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.durable.decision import asks_carriers, end_of, fault_of, has_entries, is_carrier_poison, is_left_to, window
from headrace.broker.durable.fold import JobState, fold
from headrace.broker.durable.stored_job import StoredJob, parse_job
from headrace.broker.errors import (
    DeadlineExceeded,
    JobCancelled,
    JobError,
    JobFailed,
    JobInvalid,
    JobRefused,
    JobWithdrawn,
    PoisonJob,
    ResumeImpossible,
    SlowClient,
)
from headrace.broker.messages import HEADER_STREAM, StreamEntry


def job(*, durable: bool = False) -> StoredJob:
    return parse_job(b"{}", {HEADER_STREAM: "1"} if durable else {}, tenant="t", seq=1, stored=0.0)


def taken(*carriers: str, begun: int = 0) -> JobState:
    entries = []
    for i, carrier in enumerate(carriers):
        entries.append(StreamEntry(nonce=str(i), n=1, kind="take", carrier=carrier))
        if i < begun:
            entries.append(StreamEntry(nonce=str(i), n=2, kind="ok"))
    return fold(enumerate(entries, 1))


def test_a_plain_job_has_entries_from_its_second_delivery_on() -> None:
    assert not has_entries(job(), 1)
    assert has_entries(job(), 2)
    assert has_entries(job(durable=True), 1)


def test_carriers_are_asked_about_what_was_delivered_or_taken_before() -> None:
    assert not asks_carriers(1, JobState())
    assert asks_carriers(2, JobState())
    assert asks_carriers(1, taken("a"))


@pytest.mark.parametrize(
    ("taker", "others", "gone", "left"),
    [
        (False, [], False, False),
        (False, [False, None], False, False),
        (False, [None, True], False, True),
        (True, [], True, True),
        (None, [False], False, True),
        (None, [False], True, False),
    ],
)
def test_a_job_is_left_to_a_carrier_that_has_it_or_may_have_it(
    taker: bool | None, others: list[bool | None], gone: bool, left: bool
) -> None:
    assert is_left_to(taker, others, taker_gone=gone) is left


def test_three_carriers_that_died_before_they_submitted_a_job_make_it_poison() -> None:
    assert is_carrier_poison(taken("a", "b", "c"), {"a", "b", "c"})
    assert not is_carrier_poison(taken("a", "b", "c"), {"a", "b"})
    assert not is_carrier_poison(taken("a", "a", "b"), {"a", "b"})
    assert not is_carrier_poison(taken("a", "b", "c", begun=1), {"a", "b", "c"})


@given(st.integers(0, 5000), st.integers(0, 9), st.integers(1, 3000))
def test_a_window_is_bounded_and_shut_without_capacity(slots: int, carriers: int, most: int) -> None:
    found = window(slots, carriers, most)
    assert 0 <= found <= most
    assert (found == 0) == (slots == 0)


def test_carriers_share_the_slots_of_a_pool() -> None:
    assert window(64, 1, 1024) == 128
    assert window(64, 4, 1024) == 32
    assert window(2, 8, 1024) == 8


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (JobRefused("no room", reason="shed"), "retry"),
        (JobRefused("no worker", reason="no_worker"), "retry"),
        (JobCancelled(), "retry"),
        (SlowClient(), "retry"),
        (ResumeImpossible(), "retry"),
        (DeadlineExceeded(), "expired"),
        (JobWithdrawn(), "cancelled"),
        (PoisonJob(), "poison"),
        (JobFailed("engine"), "failed"),
        (JobInvalid("no", param="n"), "failed"),
    ],
)
def test_each_end_of_a_run_has_its_meaning_for_the_job(error: JobError, ended: str) -> None:
    assert end_of(error, emitted=False) == ended


def test_what_clients_have_cannot_be_begun_again() -> None:
    assert end_of(ResumeImpossible(), emitted=True) == "failed"


def test_a_fault_names_what_was_refused() -> None:
    assert fault_of(JobRefused("full", reason="shed")).code == "shed"
    assert fault_of(JobInvalid("no", param="n")).param == "n"
