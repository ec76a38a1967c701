"""The simulator in virtual time: hours of traffic in seconds, for replaying traces offline.

The same scheduler as in the worker, driven by a clock that jumps to the end of each step.  A crash or the engine's death ends
the replay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise, repeat

from headrace.workers.engine import Sequence
from headrace.workers.errors import EngineError
from headrace.workers.sim.scheduler import SimScheduler, StepResult
from headrace.workers.sim.settings import SimSettings, raise_rejection
from headrace.workers.sim.tokens import Vocabulary, bundled_vocabulary


@dataclass(slots=True)
class Timeline:
    """The record of one sequence. Times are seconds of virtual time."""

    id: str
    arrival_s: float
    ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # one per token
    cached_tokens: int = 0
    finish: str | None = None  # None: the replay ended before the sequence
    error: str | None = None  # refused, or given up by the engine

    @property
    def ttft_s(self) -> float | None:
        return self.times_s[0] - self.arrival_s if self.times_s else None

    @property
    def finished_s(self) -> float | None:
        return self.times_s[-1] if self.finish and self.times_s else None

    @property
    def itl_s(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in pairwise(self.times_s)]


@dataclass(slots=True)
class OfflineRun:
    """A finished replay: timelines in order of arrival, and the end of the last step."""

    timelines: list[Timeline]
    end_s: float
    steps: int
    preemptions: int
    died: str | None = None


def replay(
    arrivals: Iterable[tuple[float, Sequence]], settings: SimSettings, *, vocabulary: Vocabulary | None = None
) -> OfflineRun:
    """Run these (arrival time, sequence) through one engine. Sequences that the engine refuses get `error`."""
    now = 0.0
    scheduler = SimScheduler(settings, vocabulary or bundled_vocabulary(), clock=lambda: now)
    pending = [(at, n, sequence) for n, (at, sequence) in enumerate(arrivals)]
    heapq.heapify(pending)
    timelines: dict[str, Timeline] = {}
    done = OfflineRun([], 0.0, 0, 0)
    while True:
        while pending and pending[0][0] <= now:
            at, _, sequence = heapq.heappop(pending)
            line = Timeline(sequence.id, at)
            done.timelines.append(line)
            _submit(scheduler, sequence, line, timelines)
        result = scheduler.step()
        if result is None:
            later = [at for at, _, _ in pending[:1]]
            if (due := scheduler.next_at()) is not None:
                later.append(due)
            if not later:
                break
            now = max(now, min(later))
            continue
        if result.crash or result.died is not None:
            done.died = result.died or "injected fault: crash"
            break
        now += result.duration_s
        done.steps += 1
        _record(result, now, timelines)
    done.end_s = now
    done.preemptions = scheduler.preemptions
    return done


def _submit(scheduler: SimScheduler, sequence: Sequence, line: Timeline, timelines: dict[str, Timeline]) -> None:
    faults = scheduler.settings.faults
    try:
        raise_rejection(faults, len(sequence.token_ids) - sequence.prompt_tokens)
        scheduler.submit(sequence, faults)
    except EngineError as error:
        line.error = str(error)
    else:
        timelines[sequence.id] = line


def _record(result: StepResult, now: float, timelines: dict[str, Timeline]) -> None:
    for output in result.outputs:
        line = timelines[output.id]
        line.ids += output.ids
        line.times_s += repeat(now, len(output.ids))
        if output.cached_tokens is not None:
            line.cached_tokens = output.cached_tokens
        if output.fault is not None:
            line.error = output.fault.message
        if output.finish is not None:
            line.finish = output.finish
