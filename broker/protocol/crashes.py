"""Counting crashes, so that poison is found and innocents are spared.

Movers only write down suspicions: (attempt, worker) in `Hr-History`.  The judge counts, and only what it can stand for:
distinct workers that really had that attempt, and that neither came back under the same identity nor announced a drain.  A
partition, drain, router death or broker outage therefore never counts.  The death of an engine is no suspicion but testimony:
its worker lives on and writes it down itself, for what was in the engine at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.broker.messages import HistoryEntry

CRASH_LIMIT = 3
ALONE_FROM = CRASH_LIMIT - 1
"""A job with so many crashes runs alone on its worker."""

ENGINE_DEATH = "#engine"
"""Suffix of a history entry: the engine of this worker died; the process lived long enough to move its own jobs."""


def base_worker(entry: str) -> str:
    """The worker that a history entry names."""
    return entry.split("#", 1)[0]


def crashed_workers(history: Iterable[HistoryEntry], held: set[tuple[int, str]], accounted: Callable[[str], bool]) -> set[str]:
    """The workers that crashed, or whose engine died, while they had one of these attempts."""
    crashed = set()
    for entry in history:
        worker = base_worker(entry.worker)
        if worker != entry.worker or ((entry.attempt, worker) in held and not accounted(worker)):
            crashed.add(worker)
    return crashed


def suspected(history: Iterable[HistoryEntry]) -> int:
    """Distinct workers under suspicion: the upper bound a worker knows before the judge has answered its claim."""
    return len({base_worker(entry.worker) for entry in history})
