"""The loop that runs a scheduler's steps in real time and gives their outputs out.

Step ends lie on an absolute schedule, so that a late wake-up shortens the next sleep instead of adding up; the modelled engine
works beside the worker's process and is not slowed by it.  Without modelled delay the loop still yields to the event loop
between any two steps.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.workers.engine import KvBatch, KvEvent, Output, Sink
from headrace.workers.errors import EngineError, RequestInvalid
from headrace.workers.sim.kv_transfer import SimKvTransfer
from headrace.workers.sim.scheduler import SimScheduler, StepResult
from headrace.workers.sim.settings import Faults


async def pass_time(exchange: SimKvTransfer, until: float, clock: Callable[[], float]) -> None:
    """Yield to the event loop and wait out the time of a step. The fabric is polled meanwhile."""
    while (look := exchange.poll_at()) is not None:
        await asyncio.sleep(min(until, look) - clock())
        exchange.poll()
        if clock() >= until:
            return
    await asyncio.sleep(until - clock() if until else 0)  # it yields once even if that time is over


async def until_work(scheduler: SimScheduler, work: asyncio.Event) -> None:
    """Wait for a request from outside, or for the time at which the scheduler has something due."""
    loop, exchange = asyncio.get_running_loop(), scheduler.exchange
    due = scheduler.next_at()
    while not work.is_set():
        look, now = exchange.poll_at(), loop.time()
        if due is not None and due <= now:
            return
        if look is not None and look <= now:  # blocks move, and polling helps them on
            await asyncio.sleep(0)
            if exchange.poll():
                return
            continue
        times = [at for at in (due, look) if at is not None]
        timer = loop.call_at(min(times), work.set) if times else None
        await work.wait()
        if timer is not None:
            timer.cancel()


MOST_STEPS = 100_000  # kept of a long profile: the last ones
_numbers = itertools.count(1)


class StepTrace:
    """The steps since the profile was started, in the trace event format."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)

    def add(self, began_s: float, ended_s: float, result: StepResult) -> None:
        """Record a step by the times of one clock."""
        self._steps.append(
            {
                "name": "step",
                "ph": "X",
                "pid": os.getpid(),
                "tid": 0,
                "ts": began_s * 1e6,
                "dur": (ended_s - began_s) * 1e6,
                "args": {"outputs": len(result.outputs), "modelled_s": result.duration_s},
            }
        )

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the trace into `folder`, which is made, under a name that is new. Raises EngineError if that fails."""
        path = folder / f"sim-{os.getpid()}-{int(time.time())}-{next(_numbers)}.trace.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode({"traceEvents": list(self._steps)}))
        except OSError as error:
            raise EngineError(f"the profile cannot be written to {path}: {error.strerror}") from error
        return {"file": str(path), "steps": len(self._steps)}


# KV events on their way from the engine to the task that forwards them, bounded and numbered.
#
# Batches are numbered from 0 at the engine's start, one per step that changed the cache, with or without a reader. A reader
# sees by the numbers that it missed a batch, and can ask for it again while it is kept. A reader that starts late or falls
# far behind does not get a gap: it gets `cleared` and then everything that is cached, under the number of the last batch that
# this includes.

Inventory = Callable[[], list[KvEvent]]
_MOST_STEPS = 4096


class EventBuffer:
    """KV events of the last steps for one reader. Kept only while it reads, and `replay` of them for a while after that."""

    def __init__(self, most_steps: int = _MOST_STEPS, *, replay: int = 0, faults: Faults | None = None) -> None:
        self._most = most_steps
        self._drop_every = faults.kv_drop_every if faults is not None else None
        self._reorder_every = faults.kv_reorder_every if faults is not None else None
        self._steps: deque[KvBatch] = deque()
        self._kept: deque[KvBatch] = deque(maxlen=replay)
        self._held_back: KvBatch | None = None
        self._ready = asyncio.Event()
        self._reading = False
        self._covered = False
        self._next = 0

    def put(self, events: list[KvEvent], inventory: Inventory) -> None:
        """Append one step's events; with no room left, replace all by the present state."""
        number = self._next
        self._next += 1
        if self._covered:
            self._covered, events = False, []
        if not self._reading:
            self._kept.clear()  # kept batches must be contiguous
            return
        batch = KvBatch(events, number)
        self._kept.append(batch)
        if len(self._steps) >= self._most:
            self._restart(inventory)
        else:
            self._deliver(batch)
        self._ready.set()

    def _deliver(self, batch: KvBatch) -> None:
        """Append a batch with the injected faults: it may be lost, or come after the batch that follows it."""
        held, self._held_back = self._held_back, None
        if self._drop_every is not None and (batch.number + 1) % self._drop_every == 0:
            self._held_back = held
            return
        if held is None and self._reorder_every is not None and (batch.number + 1) % self._reorder_every == 0:
            self._held_back = batch
            return
        self._steps.append(batch)
        if held is not None:
            self._steps.append(held)

    def _restart(self, inventory: Inventory) -> None:
        self._steps.clear()
        self._held_back = None
        self._steps.append(KvBatch([KvEvent(kind="cleared"), *inventory()], self._next - 1))

    def replay(self, start: int) -> list[KvBatch]:
        """Return the kept batches from this number on, without faults; the first may have a higher number."""
        return [batch for batch in self._kept if batch.number >= start]

    def replay_from(self, start: object) -> dict[str, Any]:
        """Return `replay` as plain data: the batches, and `next`, the number of the batch to come. Raises RequestInvalid."""
        if not isinstance(start, int) or start < 0:
            raise RequestInvalid(f"replay from {start!r}: not the number of a batch")
        batches = [{"number": batch.number, "events": msgspec.to_builtins(list(batch))} for batch in self.replay(start)]
        return {"batches": batches, "next": self._next}

    async def read(self, inventory: Inventory, *, ahead: bool = False) -> AsyncGenerator[KvBatch]:
        """Yield batches, one per step, beginning with the present state.

        `ahead`: a step runs whose events are not here yet, but the inventory has them. They are left out when they come.
        """
        self._reading, self._covered = True, ahead
        self._restart(inventory)
        try:
            while True:
                while self._steps:
                    yield self._steps.popleft()
                self._ready.clear()
                await self._ready.wait()
        finally:
            self._reading = False
            self._steps.clear()
            self._held_back = None


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
        self._clock = asyncio.get_running_loop().time
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
        return self._step_ends_s - self._clock() if self.stepping else 0.0

    async def run(self) -> StepResult:
        """Run steps until one crashes the process or kills the engine; return the result of that step."""
        scheduler, clock = self._scheduler, self._clock
        due = clock()
        while True:
            if not self._running.is_set():
                await self._running.wait()
                due = clock()
            if self._aborted:
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
            due = self._step_ends_s = max(due, began_s - _MOST_LAG_S) + result.duration_s
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
        return not self._running.is_set()

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        """Go on with the sequences that are there. Has no effect on a driver that runs."""
        self._running.set()

    def emit(self, outputs: list[Output]) -> None:
        """Give these outputs out now, beside the steps."""
        self._sink(outputs)

    def wake(self) -> None:
        self._work.set()
