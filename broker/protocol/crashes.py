"""Finds the crashes that count against a job among the suspicions in its history.

Movers only record suspicions: (attempt, worker, group) in `Hr-History`.  The judge counts, and only what it knows: distinct
workers that really had that attempt, and that neither came back under the same identity nor announced a drain.  A partition,
drain, router death or broker outage therefore never counts.  The death of an engine is not a suspicion but testimony: its
worker lives on and records it itself, for the runs that were in the engine at that moment, or, where the engine names the
requests that it died of, for these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from headrace.broker.messages import HistoryEntry

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
    """Return the worker that a history entry names."""
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
