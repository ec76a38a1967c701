"""Finds the poison among jobs that crashed together: by group testing, so that innocent jobs are neither lost nor held up.

A worker's death says little about each of its jobs: with k of them on board it is evidence of 1/k against each.  So suspects
run again in groups, each at most a fifth of the smallest group in which one of them has crashed: 64, 12, 2, 1.  Those of a
group of ten or fewer run alone.  A group that goes on clears its members; a group that crashes is tried in smaller ones.  Only
a job that crashed alone, and on trial before, or repeatedly in groups of two, ends as poison, and none before its third crash
(the second, if the engine named it).

Testing in groups: R. Dorfman, "The Detection of Defective Members of Large Populations", Annals of Mathematical Statistics 14
(1943).  A fifth and not a half, because every round costs a worker: a poison among 64 is found with five crashes, five of them
with 20.

Pure: the judge decides by these functions alone (`judge.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.messages import HistoryEntry
from headrace.broker.protocol.crashes import NAMED_DEATH, UNKNOWN_GROUP, Crash

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
    crashes = [
        Crash(entry.attempt, entry.worker, entry.group or UNKNOWN_GROUP, 2 if entry.worker.endswith(NAMED_DEATH) else 1)
        for entry in history
    ]
    return group_limit(crashes)
