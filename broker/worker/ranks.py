"""Chooses the data-parallel rank of a run, and reads and counts the runs of a worker by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import structlog

from headrace.broker import metrics
from headrace.broker.messages import HEADER_RANK, RankLoad
from headrace.broker.protocol.preemption import blocks_of
from headrace.broker.protocol.run import Run

log = structlog.get_logger()


def choose_rank(headers: Mapping[str, str] | None, runs: Iterable[Run], *, ranks: int) -> int | None:
    """Return the rank for a new run; None if the engine has only one.

    It is the rank that a router has named. Without one, or if the engine does not have that rank (any more), it is the rank
    with the fewest runs.
    """
    if ranks < 2:
        return None
    named = headers.get(HEADER_RANK, "") if headers else ""
    if named.isdecimal() and int(named) < ranks:
        return int(named)
    if named:
        metrics.UNKNOWN_RANKS.inc()
        log.warning("work.unknown_rank", rank=named, ranks=ranks)
    counts = Counter(run.rank for run in runs)
    return min(range(ranks), key=lambda rank: counts[rank])


def loads_by_rank(runs: Iterable[Run], yielding: Iterable[Run], *, ranks: int, block_size: int) -> list[RankLoad]:
    """Return what the runs of a worker say of the load of its ranks; empty if it has only one.

    `yielding` are the batch runs that would make way for interactive work.
    """
    if ranks < 2:
        return []
    held = list(runs)
    running = Counter(run.rank for run in held)
    batch = Counter(run.rank for run in held if run.batch)
    ways: Counter[int | None] = Counter()
    blocks: Counter[int | None] = Counter()
    for run in yielding:
        ways[run.rank] += 1
        blocks[run.rank] += blocks_of(run, block_size)
    return [
        RankLoad(running=running[rank], batch=batch[rank], yielding=ways[rank], yielding_blocks=blocks[rank])
        for rank in range(ranks)
    ]
