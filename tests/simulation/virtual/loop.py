"""Virtual time: many event loops, one clock, one seeded order.

Every simulated process has a `VirtualLoop`, a complete asyncio event loop without selector and threads.  A `Scheduler` owns the
clock and all timers of all loops; it runs one batch of ready callbacks of one loop at a time and moves the clock only when no
loop has anything left to do.  Same seed, same run: the order of processes, `random`, `os.urandom`, `time.time()` and the
hash order of tasks all follow from it (of strings only under a fixed PYTHONHASHSEED).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context
from heapq import heappop, heappush
from itertools import count
from typing import Any

EPOCH_S = 1_800_000_000.0  # what time.time() says at virtual zero
BUSY_LIMIT = 2_000_000  # callbacks at one instant that can only be a spin


class Livelock(Exception):
    """A process keeps calling itself without letting time pass."""


class SimTask(asyncio.Task[Any]):
    """A task whose hash is a count, so that sets of tasks iterate in the same order in every run."""

    def __init__(
        self, coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any], *, loop: VirtualLoop, **options: Any
    ) -> None:
        self._number = next(loop.task_numbers)
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of one simulated process. A paused loop keeps what becomes ready and runs none of it."""

    _ready: deque[asyncio.Handle]
    _asyncgen_firstiter_hook: Any
    _asyncgen_finalizer_hook: Any

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        super().__init__()
        self.name = name
        self.paused = False
        self.task_numbers = count(1)
        self._tasks: list[SimTask] = []  # strong references: nothing of a crashed process may be collected, and so run, early
        self._prune_at = 64
        self._scheduler = scheduler
        self._queued = False
        self.set_debug(False)

    def time(self) -> float:
        return self._scheduler.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._queued and not self.paused:
            self._queued = True
            self._scheduler.runnable.append(self)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._scheduler.push(max(when, self._scheduler.now), handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._scheduler.now + delay, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: Any = None, context: Context | None = None, **_: Any) -> SimTask:  # type: ignore[override]
        task = SimTask(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._prune_at:
            self._tasks = self.pending_tasks()
            self._prune_at = 2 * len(self._tasks) + 64
        return task

    def pending_tasks(self) -> list[SimTask]:
        return [task for task in self._tasks if not task.done()]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """There are no threads: the function runs at once, its result arrives with the next batch."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        if self._ready and not self._queued:
            self._queued = True
            self._scheduler.runnable.append(self)

    def run_batch(self) -> int:
        """Run what was ready when the batch began. Returns how many callbacks ran."""
        self._queued = False
        if self.paused:
            return 0
        ready = self._ready
        todo = len(ready)
        ran = 0
        while ran < todo:
            handle = ready.popleft()
            ran += 1
            if not handle._cancelled:
                handle._run()
                if self.paused:  # it crashed or froze in the middle
                    return ran
        if ready and not self._queued:
            self._queued = True
            self._scheduler.runnable.append(self)
        return ran

    def enter(self) -> None:
        """Make this the running loop of the thread."""
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=self._asyncgen_firstiter_hook, finalizer=self._asyncgen_finalizer_hook)

    def bury(self, rounds: int = 50) -> None:
        """Cancel and finish all tasks, then close. Their process must be unable to reach anything by now."""
        self.set_exception_handler(lambda _loop, _context: None)
        self.resume()
        outer, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        self.enter()
        for _ in range(rounds):
            if not (tasks := self.pending_tasks()):
                break
            for task in tasks:
                task.cancel()
            for _ in range(rounds):
                if not self._ready:
                    break
                self.run_batch()
        for task in self.pending_tasks():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.clear()
        self.close()
        asyncio._set_running_loop(outer)
        sys.set_asyncgen_hooks(*hooks)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _process_events(self, event_list: object) -> None:
        raise NotImplementedError("a virtual loop has no selector")


class Scheduler:
    """The clock, the timers and the seeded order of everything."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.callbacks = 0
        self.runnable: list[VirtualLoop] = []
        self._heap: list[tuple[float, int, Any]] = []
        self._order = count()
        self._current: VirtualLoop | None = None
        self._stop = False
        self._process_random = random.Random(f"process {seed}").getstate()
        self._entropy = random.Random(f"entropy {seed}")

    def push(self, when: float, item: Any) -> None:
        heappush(self._heap, (when, next(self._order), item))

    def at(self, delay_s: float, function: Callable[..., object], *args: Any) -> None:
        """Call outside of all processes, after `delay_s`."""
        heappush(self._heap, (self.now + delay_s, next(self._order), (function, args)))

    def stop(self) -> None:
        """Make `advance` return after the current callback batch."""
        self._stop = True

    def advance(self, until_s: float) -> None:
        """Run everything that happens up to virtual time `until_s`. Raises Livelock."""
        self._stop = False
        with self._virtual_environment():
            self._run(until_s)

    def _run(self, until_s: float) -> None:
        heap, runnable, rng = self._heap, self.runnable, self.rng.random
        busy = 0
        while not self._stop:
            if runnable:
                n = len(runnable)
                if n > 1:
                    i = int(rng() * n)
                    runnable[i], runnable[-1] = runnable[-1], runnable[i]
                loop = runnable.pop()
                if loop is not self._current:
                    self._current = loop
                    loop.enter()
                ran = loop.run_batch()
                self.callbacks += ran
                busy += ran + 1
                if busy > BUSY_LIMIT:
                    raise Livelock(f"{loop.name} does not let time pass at {self.now:.3f}")
                continue
            if not heap or heap[0][0] > until_s:
                self.now = max(self.now, until_s)
                return
            if heap[0][0] > self.now:
                self.now = heap[0][0]
                busy = 0
            while heap and heap[0][0] <= self.now:  # all of one instant, so that the seed decides who goes first
                item = heappop(heap)[2]
                if type(item) is tuple:
                    item[0](*item[1])
                elif not item._cancelled:
                    loop = item._loop
                    loop._ready.append(item)
                    if not loop._queued and not loop.paused:
                        loop._queued = True
                        runnable.append(loop)

    @contextmanager
    def _virtual_environment(self) -> Iterator[None]:
        outer = asyncio._get_running_loop()
        hooks = sys.get_asyncgen_hooks()
        outer_random = random.getstate()
        saved = [
            (time, "time"),
            (time, "time_ns"),
            (time, "monotonic"),
            (time, "monotonic_ns"),
            (os, "urandom"),
            (random, "_urandom"),
        ]
        originals = [getattr(module, name) for module, name in saved]
        replacements = [
            lambda: EPOCH_S + self.now,
            lambda: int((EPOCH_S + self.now) * 1e9),
            lambda: self.now,
            lambda: int(self.now * 1e9),
            self._entropy.randbytes,
            self._entropy.randbytes,
        ]
        random.setstate(self._process_random)
        for (module, name), replacement in zip(saved, replacements, strict=True):
            setattr(module, name, replacement)
        try:
            yield
        finally:
            for (module, name), original in zip(saved, originals, strict=True):
                setattr(module, name, original)
            self._process_random = random.getstate()
            random.setstate(outer_random)
            self._current = None
            asyncio._set_running_loop(outer)
            sys.set_asyncgen_hooks(*hooks)
