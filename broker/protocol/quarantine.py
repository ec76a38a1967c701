"""Quarantine of jobs that may crash their workers: crashes that count, group tests, poison, and clearance.

A job is cleared once a later run has gone well past the place where it stood when the crashes happened: poison crashes there
again, an innocent job does not. A job that crashes every few seconds would be cleared in between each time, so from the third
time on clearing takes ever longer.

Sans-io: the time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.broker.messages.control import HistoryEntry

CLEAR_AFTER_S = 0.5  # from the first frame of the run
CLEAR_TOKENS = 8  # further, of every choice that is still open
EASY_CLEARANCES = 2  # that take no longer than the first
LONGEST_S = 60.0


def clear_after_s(clearances: int) -> float:
    """Return the time that a run has to go on to clear a job that was cleared so often before."""
    return min(CLEAR_AFTER_S * 2.0 ** min(max(0, clearances - EASY_CLEARANCES + 1), 16), LONGEST_S)


class Clearance:
    """The progress of one run of a job against which crashes count."""

    __slots__ = ("_after_s", "_left", "_since_s")

    def __init__(self, emitted: Sequence[int], open_choices: Sequence[int], after_s: float) -> None:
        """`emitted`: tokens of each choice when the run began."""
        self._after_s = after_s
        self._left = {choice: emitted[choice] + CLEAR_TOKENS for choice in open_choices}
        self._since_s: float | None = None

    def reached(self, choice: int, tokens: int, now_s: float, *, ended: bool = False) -> bool:
        """Note that a choice has so many tokens. True once the run has gone far enough to clear its job."""
        if self._since_s is None:
            self._since_s = now_s
        if ended or tokens >= self._left.get(choice, 0):
            self._left.pop(choice, None)
        return not self._left and now_s - self._since_s >= self._after_s


# Finds the crashes that count against a job among the suspicions in its history.
#
# Movers only record suspicions: (attempt, worker, group) in `Hr-History`. The judge counts, and only what it knows: distinct
# workers that really had that attempt, and that neither came back under the same identity nor announced a drain. A partition,
# drain, router death or broker outage therefore never counts. The death of an engine is not a suspicion but testimony: its
# worker lives on and records it itself, for the runs that were in the engine at that moment, or, where the engine names the
# requests that it died of, for these alone.

ENGINE_DEATH = "#engine"
"""Suffix of a history entry: the engine of this worker died, and the process lived long enough to move its own jobs."""

NAMED_DEATH = "#named"
"""Suffix of a history entry: the engine died and named this request as the cause."""

UNKNOWN_GROUP = 64
"""Jobs that a worker is taken to have had when it crashed, where their number is not known."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The promise of a worker for a run that was granted: at most `group` suspects at once; `beside`: other jobs ran there."""

    group: int
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash that counts. The cause is one of the `group` jobs that the worker had; `beside`: or a job that was no suspect.

    `tested`: the worker had the job on trial.
    """

    attempt: int
    worker: str
    group: int
    weight: int = 1
    beside: bool = False
    tested: bool = False


def base_worker(entry: str) -> str:
    return entry.split("#", 1)[0]


def counted(
    history: Iterable[HistoryEntry], held: set[tuple[int, str]], accounted: Callable[[str], bool]
) -> list[HistoryEntry]:
    """Return the entries of workers that crashed, or whose engine died, while they had the attempt.

    `held`: attempts and workers that really had them. `accounted(worker)`: its process did not crash.
    """
    found = []
    for entry in history:
        worker = base_worker(entry.worker)
        if worker != entry.worker or ((entry.attempt, worker) in held and not accounted(worker)):
            found.append(entry)
    return found


def crashes_of(entries: Collection[HistoryEntry], grants: Mapping[tuple[int, str], Grant]) -> list[Crash]:
    """Return the crashes that these entries tell of, one per worker, the first one first.

    Of several counts of one crash the largest is taken, because a mover that comes late finds fewer jobs left.  What the worker
    had promised for the run bounds it: jobs that only waited there cannot be the cause.
    """
    newest: dict[str, int] = {}
    for entry in entries:
        worker = base_worker(entry.worker)
        newest[worker] = max(newest.get(worker, 0), entry.attempt)
    return sorted(
        (_crash(worker, attempt, entries, grants.get((attempt, worker))) for worker, attempt in newest.items()),
        key=lambda crash: (crash.attempt, crash.worker),
    )


def _crash(worker: str, attempt: int, entries: Collection[HistoryEntry], grant: Grant | None) -> Crash:
    told = [entry for entry in entries if entry.attempt == attempt and base_worker(entry.worker) == worker]
    stored = max(entry.group for entry in told) or UNKNOWN_GROUP
    if any(entry.worker.endswith(NAMED_DEATH) for entry in told):
        return Crash(attempt, worker, stored, weight=2, tested=True)
    if grant is None or stored <= grant.group:
        return Crash(attempt, worker, stored, tested=grant is not None)
    # Of several suspects one may have been cleared and stayed: only of one alone it is known that nothing else ran there.
    return Crash(attempt, worker, grant.group, beside=grant.beside or grant.group > 1, tested=True)


# Finds the poison among jobs that crashed together: by group testing, so that innocent jobs are neither lost nor held up.
#
# A worker's death says little about each of its jobs: with k of them on board it is evidence of 1/k against each. So suspects
# run again in groups, each at most a fifth of the smallest group in which one of them has crashed: 64, 12, 2, 1. Those of a
# group of ten or fewer run alone. A group that goes on clears its members; a group that crashes is tried in smaller ones.
# Only a job that crashed alone, and on trial before, or repeatedly in groups of two, ends as poison, and none before its
# third crash (the second, if the engine named it).
#
# Testing in groups: R. Dorfman, "The Detection of Defective Members of Large Populations", Annals of Mathematical Statistics
# 14 (1943). A fifth and not a half, because every round costs a worker: a poison among 64 is found with five crashes, five of
# them with 20.
#
# Pure: the judge decides by these functions alone (`judge.py`).

SUSPECT_WEIGHT = 2
"""A job is suspect from this weight of crashes on; a crash weighs 1, one of which the engine named the job 2."""

POISON_WEIGHT = 3
SHRINK = 5  # a group is tried in groups of this part
ALONE = 10  # of a group of at most so many each is tried alone
PAIR = 2
PROOFS = 2


def group_limit(crashes: Sequence[Crash]) -> int:
    """Return the most suspects that may run together with this job; 0 = the job is not suspect."""
    if sum(crash.weight for crash in crashes) < SUSPECT_WEIGHT:
        return 0
    if any(crash.weight >= SUSPECT_WEIGHT for crash in crashes):
        return 1
    smallest = min(crash.group for crash in crashes)
    return smallest // SHRINK if smallest > ALONE else 1


def is_poison(crashes: Sequence[Crash]) -> bool:
    """Decide whether a job ends workers by itself: it crashed alone at last, or more than once in a group of two.

    A worker that is killed just when it has an innocent suspect alone must not be its end: alone, or on trial, it has to have
    crashed before.
    """
    if sum(crash.weight for crash in crashes) < POISON_WEIGHT:
        return False
    last = crashes[-1]
    alone = last.group == 1 and not last.beside and sum(crash.tested or crash.group == 1 for crash in crashes) >= PROOFS
    return alone or sum(crash.group <= PAIR and not crash.beside for crash in crashes) >= PROOFS


def in_words(crashes: Sequence[Crash]) -> str:
    """Say for the client and the dead letter how many workers crashed, and of how many jobs each time."""
    groups = [str(crash.group) for crash in crashes]
    return (
        f"the request was running on {len(crashes)} workers when each of them crashed; the cause was among "
        f"{', '.join(groups[:-1])} and {groups[-1]} of their jobs"
    )


def limit_by_header(history: Sequence[HistoryEntry]) -> int:
    """Return the group limit that the entries of a stored message allow for, before its judge is asked; 0 = not suspect.

    An upper bound of the suspicion: the judge knows which of the entries count.
    """
    if not history:
        return 0
    crashes = [
        Crash(entry.attempt, entry.worker, entry.group or UNKNOWN_GROUP, 2 if entry.worker.endswith(NAMED_DEATH) else 1)
        for entry in history
    ]
    return group_limit(crashes)
