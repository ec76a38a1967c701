"""Which suspicions are crashes, and of how many jobs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages import HistoryEntry
from headrace.broker.protocol.crashes import UNKNOWN_GROUP, Crash, Grant, counted, crashes_of


def test_only_workers_that_had_the_attempt_and_did_not_survive_it_count_and_engines_that_died() -> None:
    history = [HistoryEntry(1, "had"), HistoryEntry(1, "lives"), HistoryEntry(2, "never"), HistoryEntry(3, "w#engine")]
    found = counted(history, {(1, "had"), (1, "lives")}, lambda worker: worker == "lives")
    assert [entry.worker for entry in found] == ["had", "w#engine"]


def test_of_two_counts_of_a_crash_the_larger_one_holds() -> None:
    """The mover that came later found fewer jobs."""
    entries = [HistoryEntry(1, "a", 30), HistoryEntry(1, "a", 14)]
    assert crashes_of(entries, {}) == [Crash(1, "a", 30)]


def test_what_was_promised_bounds_the_group() -> None:
    entries = [HistoryEntry(1, "a", 9), HistoryEntry(2, "b"), HistoryEntry(3, "c", 2), HistoryEntry(4, "d", 9)]
    grants = {(1, "a"): Grant(1), (2, "b"): Grant(4), (3, "c"): Grant(4), (4, "d"): Grant(1, beside=True)}
    assert crashes_of(entries, grants) == [
        Crash(1, "a", 1, tested=True),
        Crash(2, "b", 4, beside=True, tested=True),  # one of the four may have been cleared, and another have taken its place
        Crash(3, "c", 2, tested=True),
        Crash(4, "d", 1, beside=True, tested=True),
    ]


def test_an_unknown_group_is_a_large_one_and_a_named_request_weighs_twice() -> None:
    assert crashes_of([HistoryEntry(1, "a"), HistoryEntry(2, "b#named", 1)], {}) == [
        Crash(1, "a", UNKNOWN_GROUP),
        Crash(2, "b", 1, weight=2, tested=True),
    ]


@given(st.lists(st.builds(HistoryEntry, st.integers(1, 5), st.sampled_from(["a", "a#engine", "b", "c"]), st.integers(0, 9))))
def test_a_worker_crashes_once(entries: list[HistoryEntry]) -> None:
    crashes = crashes_of(entries, {})
    assert len({crash.worker for crash in crashes}) == len(crashes)
    assert crashes == sorted(crashes, key=lambda crash: (crash.attempt, crash.worker))
    assert all(crash.group >= 1 for crash in crashes)
