"""The rule by which poison is found: pure, and played on its own with workers that hold nothing but jobs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.broker.messages import HistoryEntry
from headrace.broker.protocol.crashes import Crash
from headrace.broker.protocol.group_testing import group_limit, in_words, is_poison, limit_by_header


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
