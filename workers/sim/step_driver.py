"""The loop that runs a scheduler's steps in real time and gives their outputs out.

Step ends lie on an absolute schedule, so that a late wake-up shortens the next sleep instead of adding up; the modelled engine
works beside the worker's process and is not slowed by it.  Without modelled delay the loop still yields to the event loop
between any two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.workers.engine import KvEvent, Output, Sink
from headrace.workers.sim.driver_wait import pass_time, until_work
from headrace.workers.sim.events import EventBuffer
from headrace.workers.sim.profile import StepTrace
from headrace.workers.sim.scheduler import SimScheduler, StepResult

_MOST_LAG_S = 1.0  # an engine that falls further behind its schedule does not catch up


class StepDriver:
    """Drives one scheduler. Setting the event `work` makes it look at the scheduler again."""

    def __init__(self, scheduler: SimScheduler, events: EventBuffer, sink: Sink, work: asyncio.Event) -> None:
        self._scheduler = scheduler
        self._events = events
        self._sink = sink
        self._work = work
        self._aborted: set[str] = set()  # ids aborted during the running step
        self._step_ends_s = 0.0  # by the loop's clock
        self.stepping = False  # a step runs, and its outputs are not out yet
        self._running = asyncio.Event()  # not set while paused
        self._running.set()
        self.trace: StepTrace | None = None  # a profile that is being taken

    @property
    def idle(self) -> bool:
        """No step runs, and the scheduler has no sequence and no blocks on offer."""
        return not self.stepping and self._scheduler.idle

    @property
    def step_left_s(self) -> float:
        """Seconds until the running step ends; 0 when none runs."""
        return self._step_ends_s - asyncio.get_running_loop().time() if self.stepping else 0.0

    async def run(self) -> StepResult:
        """Run steps until one crashes the process or kills the engine; return the result of that step."""
        scheduler, clock = self._scheduler, asyncio.get_running_loop().time
        due = clock()
        while True:
            if not self._running.is_set():
                await self._running.wait()
                due = clock()
            self._aborted.clear()
            began_s = clock()
            result = scheduler.step()
            self.stepping = result is not None
            if result is None:
                self._publish(scheduler.manager.take_events())
                self._work.clear()
                await until_work(scheduler, self._work)
                due = clock()
                continue
            if result.crash or result.died is not None:
                return result
            due = self._step_ends_s = max(due, clock() - _MOST_LAG_S) + result.duration_s
            await pass_time(scheduler.exchange, due if result.duration_s else 0.0, clock)
            outputs = result.outputs
            if self._aborted:
                outputs = [output for output in outputs if output.id not in self._aborted]
            if outputs:
                self._sink(outputs)
            self.stepping = False
            if self.trace is not None:
                self.trace.add(began_s, clock(), result)
            if result.events:
                self._publish(result.events)

    def _publish(self, events: list[KvEvent]) -> None:
        if events:
            self._events.put(events, self._scheduler.manager.snapshot)

    def abort(self, ids: Sequence[str]) -> None:
        """Drop these sequences. Outputs of the running step that are not out yet are dropped too."""
        self._scheduler.abort(ids)
        self._aborted.update(ids)
        self.wake()

    @property
    def paused(self) -> bool:
        """No step is begun."""
        return not self._running.is_set()

    def pause(self) -> None:
        """Begin no step any more. The running one ends, and all sequences stay."""
        self._running.clear()

    def resume(self) -> None:
        """Go on with the sequences that are there. Has no effect on a driver that runs."""
        self._running.set()

    def emit(self, outputs: list[Output]) -> None:
        """Give these outputs out now, beside the steps."""
        self._sink(outputs)

    def wake(self) -> None:
        """Look at the scheduler again."""
        self._work.set()
