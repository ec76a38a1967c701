"""Keeps the outputs of engine steps apart when the event loop was late and several steps have arrived in one turn of it.

An engine's readers then find more than one output of a sequence. The first output of each sequence belongs to the oldest step,
its second one to the next step, and so on: each step is one call of the sink, as if the loop had been in time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from itertools import chain

from headrace.workers.engine import Output, Sink


class EngineSteps:
    """The outputs of one turn of the event loop, by step. Used on the event loop only."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: list[list[Output]] = []
        self._leaving: deque[list[Output]] = deque()
        self._taken: dict[str, int] = {}  # sequence → its outputs of this turn
        self._loop = asyncio.get_running_loop()

    def add(self, output: Output) -> None:
        """Add an output to its step. The first one of a turn schedules the calls of the sink, at the turn's end."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        step = self._taken.get(output.id, 0)
        self._taken[output.id] = step + 1
        if step == len(self._waiting):
            self._waiting.append([])
        self._waiting[step].append(output)

    def drop(self, ids: Collection[str]) -> None:
        """Drop the outputs of these sequences, so that none of them reaches the sink any more, in whose call this may be."""
        for step in chain(self._leaving, self._waiting):
            step[:] = [output for output in step if output.id not in ids]

    def clear(self) -> None:
        """Drop all outputs."""
        for step in chain(self._leaving, self._waiting):
            step.clear()

    def _flush(self) -> None:
        self._leaving.extend(self._waiting)
        self._waiting = []
        self._taken.clear()
        while self._leaving:
            if step := self._leaving.popleft():
                self._sink(step)
