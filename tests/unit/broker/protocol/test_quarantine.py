"""When a run has gone far enough to clear its job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.broker.messages.control import HistoryEntry
from headrace.broker.protocol.quarantine import (
    LONGEST_S,
    UNKNOWN_GROUP,
    Clearance,
    Crash,
    Grant,
    clear_after_s,
    counted,
    crashes_of,
    group_limit,
    in_words,
    is_poison,
    limit_by_header,
)


def test_the_first_two_clearances_take_half_a_second_and_each_further_one_twice_as_long_up_to_a_minute() -> None:
    assert [clear_after_s(n) for n in range(11)] == [0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert clear_after_s(10**6) == LONGEST_S


@pytest.mark.parametrize(("tokens", "now_s", "cleared"), [(18, 6.0, True), (17, 60.0, False), (1000, 5.9, False)])
def test_it_takes_tokens_and_time(tokens: int, now_s: float, *, cleared: bool) -> None:
    watch = Clearance([10], [0], 1.0)
    assert not watch.reached(0, 11, 5.0)
    assert watch.reached(0, tokens, now_s) is cleared


def test_every_open_choice_has_to_go_on_or_end() -> None:
    watch = Clearance([0, 0, 5], [0, 1], 1.0)  # the third has ended before
    assert not watch.reached(0, 8, 0.0)
    assert not watch.reached(0, 20, 2.0)
    assert watch.reached(1, 1, 2.0, ended=True)


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


def crashes(*groups: int) -> list[Crash]:
    return [Crash(n, f"w{n}", group) for n, group in enumerate(groups, start=1)]


@pytest.mark.parametrize(
    ("groups", "limit"),
    [((), 0), ((1,), 0), ((64, 64), 12), ((64, 64, 12), 2), ((20, 7), 1), ((64, 64, 10), 1), ((3, 90), 1), ((11, 90), 2)],
)
def test_suspects_run_in_a_fifth_of_the_smallest_group_in_which_they_crashed(groups: tuple[int, ...], limit: int) -> None:
    assert group_limit(crashes(*groups)) == limit


@pytest.mark.parametrize(
    ("groups", "poison"),
    [
        ((1, 1), False),
        ((9, 9, 1), False),  # it was killed while it was tried alone, perhaps
        ((9, 9, 1, 1), True),
        ((1, 1, 1), True),
        ((9, 9, 2), False),
        ((9, 2, 2), True),
        ((1, 9, 9), False),  # an old one alone proves nothing: it was killed, perhaps
        ((9, 9, 9, 9, 9, 9), False),
    ],
)
def test_only_a_crash_alone_or_two_in_groups_of_two_are_proof(groups: tuple[int, ...], *, poison: bool) -> None:
    assert is_poison(crashes(*groups)) is poison


def test_a_crash_on_trial_and_one_alone_are_proof() -> None:
    on_trial = Crash(3, "w3", 16, tested=True)
    assert is_poison([*crashes(64, 64), on_trial, Crash(4, "w4", 1, tested=True)])
    assert not is_poison([*crashes(64, 64), on_trial, Crash(4, "w4", 4, tested=True)])


def test_a_crash_beside_other_jobs_is_no_proof() -> None:
    assert not is_poison([*crashes(9, 9), Crash(3, "w3", 1, beside=True)])
    assert not is_poison([*crashes(9), Crash(2, "w2", 2, beside=True), Crash(3, "w3", 2)])


def test_a_named_request_is_tried_alone_and_is_poison_the_second_time() -> None:
    named = [Crash(n, f"w{n}", 1, weight=2, tested=True) for n in (1, 2)]
    assert (group_limit(named[:1]), is_poison(named[:1])) == (1, False)
    assert is_poison(named)


def test_the_words_give_the_groups() -> None:
    assert "on 3 workers" in in_words(crashes(20, 5, 1))
    assert "among 20, 5 and 1 of their jobs" in in_words(crashes(20, 5, 1))


def test_the_header_alone_gives_an_upper_bound() -> None:
    assert limit_by_header([HistoryEntry(1, "a", 20)]) == 0
    assert limit_by_header([HistoryEntry(1, "a", 20), HistoryEntry(2, "b", 15)]) == 3
    assert limit_by_header([HistoryEntry(1, "a"), HistoryEntry(2, "b")]) == 12
    assert limit_by_header([HistoryEntry(1, "a#named", 1)]) == 1


Spread = Callable[[list[int]], list[list[int]]]
"""Splits jobs that nobody suspects yet into groups, one per worker."""


class Jobs:
    """Jobs that run in groups: those who crash a worker, and those who run beside them. A group that goes on is cleared."""

    def __init__(self, poison: set[int], count: int) -> None:
        self.poison = poison
        self.history: dict[int, list[Crash]] = {job: [] for job in range(count)}
        self.crashes = 0
        self.ended: list[int] = []

    def run(self, group: list[int]) -> None:
        if self.poison.isdisjoint(group):
            for job in group:
                del self.history[job]  # it has its answer
            return
        self.crashes += 1
        for job in group:
            tested = group_limit(self.history[job]) > 0
            self.history[job].append(Crash(self.crashes, f"w{self.crashes}", len(group), tested=tested))
            if is_poison(self.history[job]):
                self.ended.append(job)
                del self.history[job]

    def test_all(self, spread: Spread, size: Callable[[int], int] = lambda limit: limit) -> None:
        """Twice wherever they happen to run, then in groups of at most what the rule allows: `size` of the limit."""
        for _ in range(2):
            for group in spread(list(self.history)):
                self.run(group)
        while self.history:
            order = sorted(self.history, key=lambda job: (group_limit(self.history[job]), -len(self.history[job])))
            self.run(order[: size(group_limit(self.history[order[0]]))])


def evenly(workers: int) -> Spread:
    return lambda jobs: [group for worker in range(workers) if (group := jobs[worker::workers])]


def anyhow(data: st.DataObject) -> Spread:
    """On up to seven workers, of which the first ones tend to have most."""

    def spread(jobs: list[int]) -> list[list[int]]:
        places = st.lists(st.integers(0, data.draw(st.integers(0, 6))), min_size=len(jobs), max_size=len(jobs))
        groups: dict[int, list[int]] = {}
        for job, place in zip(jobs, data.draw(places), strict=True):
            groups.setdefault(place, []).append(job)
        return list(groups.values())

    return spread


def test_one_poison_is_found_with_five_crashes_at_most_wherever_it_is() -> None:
    """Two where nobody is suspect yet, then a group of sixteen, one of four and one alone."""
    for workers in (1, 2, 3, 6):
        for poison in range(64):
            jobs = Jobs({poison}, 64)
            jobs.test_all(evenly(workers))
            assert jobs.ended == [poison]
            assert jobs.crashes <= 5


@given(st.integers(1, 64), st.data())
@settings(deadline=None)
def test_one_poison_is_found_with_five_crashes_at_most_however_the_jobs_are_grouped(count: int, data: st.DataObject) -> None:
    jobs = Jobs({data.draw(st.integers(0, count - 1))}, count)
    jobs.test_all(anyhow(data), lambda limit: data.draw(st.integers(1, limit)))
    assert jobs.ended == sorted(jobs.poison)
    assert jobs.crashes <= 5


FIVE = st.sets(st.integers(0, 63), min_size=5, max_size=5)


@given(st.integers(1, 8), FIVE)
@example(5, {0, 1, 2, 3, 4})
@settings(deadline=None)
def test_five_are_found_with_twenty_crashes_at_most_where_jobs_are_spread_evenly(workers: int, poison: set[int]) -> None:
    jobs = Jobs(poison, 64)
    jobs.test_all(evenly(workers))
    assert sorted(jobs.ended) == sorted(poison)
    assert jobs.crashes <= 20


@given(FIVE, st.data())
@settings(deadline=None)
def test_five_are_found_with_twenty_crashes_at_most_however_the_jobs_are_grouped(poison: set[int], data: st.DataObject) -> None:
    """Of a group of at most 54 each takes four at most: two before it is suspect, one in a group of at most ten, one alone.

    One of a larger group takes five, but then the others are few: they crash together, or among so few that three are proof.
    """
    jobs = Jobs(poison, 64)
    jobs.test_all(anyhow(data), lambda limit: data.draw(st.integers(1, limit)))
    assert sorted(jobs.ended) == sorted(poison)
    assert jobs.crashes <= 20


@pytest.mark.parametrize("first", range(1, 61))
def test_five_are_found_with_twenty_crashes_where_one_worker_has_most_of_the_jobs(first: int) -> None:
    """The others share the rest, each with one poison."""
    rest = range(first, 64)
    groups = [list(range(first)), *([*rest[worker::4]] for worker in range(4))]
    poison = {group[0] for group in groups}
    jobs = Jobs(poison, 64)
    jobs.test_all(lambda left: [kept for group in groups if (kept := [job for job in group if job in left])])
    assert sorted(jobs.ended) == sorted(poison)
    assert jobs.crashes <= 20
