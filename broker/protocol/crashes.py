"""Counts the crashes of a job, so that poison is found and innocent jobs are spared.

Movers only record suspicions: (attempt, worker) in `Hr-History`.  The judge counts, and only what it knows: distinct workers
that really had that attempt, and that neither came back under the same identity nor announced a drain.  A partition, drain,
router death or broker outage therefore never counts.  The death of an engine is not a suspicion but testimony: its worker lives
on and records it itself, for the runs that were in the engine at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.broker.messages import HistoryEntry

CRASH_LIMIT = 3
ALONE_FROM = CRASH_LIMIT - 1
"""A job with so many crashes is suspect, and runs alone on its worker."""

ENGINE_DEATH = "#engine"
"""Suffix of a history entry: the engine of this worker died, and the process lived long enough to move its own jobs."""


def base_worker(entry: str) -> str:
    """Return the worker that a history entry names."""
    return entry.split("#", 1)[0]


def crashed_workers(history: Iterable[HistoryEntry], held: set[tuple[int, str]], accounted: Callable[[str], bool]) -> set[str]:
    """Return the workers that crashed, or whose engine died, while they had one of these attempts.

    `held`: attempts and workers that really had them. `accounted(worker)`: its process did not crash.
    """
    crashed = set()
    for entry in history:
        worker = base_worker(entry.worker)
        if worker != entry.worker or ((entry.attempt, worker) in held and not accounted(worker)):
            crashed.add(worker)
    return crashed


def suspected(history: Iterable[HistoryEntry]) -> int:
    """Count the distinct workers under suspicion: an upper bound, known before the judge has answered a claim."""
    return len({base_worker(entry.worker) for entry in history})
