"""The order on a trial worker: which suspect may start, and what the worker promises its judge for it.

A worker on trial starts suspects only, and never more of them at once than the smallest limit among them allows.  The most
suspect one goes first.  What runs there already is moved away where others have room (`broker/worker/isolation.py`), and a
suspect waits for that, but not forever: in the end it starts beside the others, and its crash is no proof then.  So a job that
crashes again and again beside others waits longer each time: in a pool of one worker nothing can be moved away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.broker.protocol.run import STARTED, Run, RunState


class Turn(NamedTuple):
    """The promise under which a run starts: at most `group` suspects at once (0 = no limit); `beside`: other jobs run there."""

    group: int
    beside: bool = False


ORDINARY = Turn(0)
PATIENT_CRASHES = 3  # up to so many the patience of a suspect is the usual one
LONGEST_S = 60.0


def alone_after_s(crashes: int, patience_s: float) -> float:
    """Return how long a suspect that is to run alone waits for others to leave, before it starts beside them."""
    return max(patience_s, min(patience_s * 2.0 ** min(max(0, crashes - PATIENT_CRASHES), 16), LONGEST_S))


def turn_of_suspect(run: Run, suspects: Sequence[Run], runs: Iterable[Run], *, overdue: bool) -> Turn | None:
    """Return the promise under which this suspect may start now, or None. `suspects` and `runs` are those of the worker.

    Jobs that were suspect and are cleared keep only a suspect waiting that is to run alone.
    """
    others = [other for other in suspects if other is not run]
    started = [other for other in others if other.state in STARTED]
    if len(started) >= min([run.limit, *(other.limit for other in started)]):
        return None
    if any(other.state is RunState.WAITING and _rank(other) < _rank(run) for other in others):
        return None
    beside = [other for other in runs if other is not run and not other.suspect and other.state in STARTED]
    if beside and not overdue and (run.limit == 1 or not all(other.cleared for other in beside)):
        return None
    return Turn(run.limit, beside=bool(beside))


def all_beside(suspects: Sequence[Run], runs: Iterable[Run]) -> bool:
    """Return True if these suspects have started beside other jobs or are to, and none of them waits to run alone.

    `runs` are those of a worker from which nothing can be moved away.
    """
    if any(run.limit == 1 or (run.state in STARTED and not run.beside) for run in suspects):
        return False
    return any(run.state in STARTED and (run.beside or not run.suspect) for run in runs)


def _rank(run: Run) -> tuple[int, int, int]:
    """Order suspects: the most suspect first."""
    return run.limit, -run.crashes, run.seq
