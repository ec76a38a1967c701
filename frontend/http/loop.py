"""The event loop: its lag, a time budget per iteration, and memory returned to the system."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from headrace.frontend.metrics import Series

log = structlog.get_logger()

PERIOD_S = 0.05
WARN_S = 0.5
WARN_EVERY_S = 10.0


async def watch_lag(series: Series, *, period_s: float = PERIOD_S) -> None:
    """Observe how much later than requested a sleep ends, again and again, until cancelled."""
    loop = asyncio.get_running_loop()
    silent_until = 0.0
    while True:
        due = loop.time() + period_s
        await asyncio.sleep(period_s)
        late = max(0.0, loop.time() - due)
        series.observe(late)
        if late > WARN_S and due > silent_until:
            silent_until = due + WARN_EVERY_S
            log.warning("loop.blocked", seconds=round(late, 3))


# Limits the time that socket callbacks take in one iteration of the event loop, and defers the rest to later iterations.
#
# One iteration runs the callbacks of every socket with data. With thousands of sockets this takes longer than streams may
# wait, and clients decide how long. So the work that they cause runs at once only while the iteration is within its budget.
# The rest waits in a queue, and each following iteration runs a part of it.

BUDGET_S = 0.008  # per iteration for new data, and as much for the queue; the rest of the iteration runs the tasks they woke


class LoopBudget:
    """The budget and the queue of one event loop. Each connection has at most a few entries, which bounds the queue."""

    __slots__ = ("_began", "_budget_s", "_loop", "_queue")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, budget_s: float = BUDGET_S) -> None:
        self._loop = loop
        self._budget_s = budget_s
        self._began = 0.0  # time of the first data in this iteration; 0 = none yet
        self._queue: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def is_spent(self) -> bool:
        """Return True if new work has to be deferred."""
        began = self._began
        if not began:
            self._began = time.perf_counter()
            self._loop.call_soon(self._next)
            return False
        return time.perf_counter() - began > self._budget_s

    def defer(self, work: Callable[[], None]) -> None:
        """Run `work` in one of the next iterations, after all work that was deferred before."""
        self._queue.append(work)
        self.is_spent()  # schedules the next iteration

    def _next(self) -> None:
        """Begin another iteration: run deferred work first, before new data."""
        self._began = 0.0
        queue = self._queue
        if not queue:
            return
        until = time.perf_counter() + self._budget_s
        try:
            while queue and time.perf_counter() < until:
                queue.popleft()()
        finally:
            if queue:
                self.is_spent()


# Returns the memory of large requests to the system, which the allocator would otherwise keep.
#
# The calls are those of glibc's allocator. Other C libraries do not have them, or do not need them.

_LARGE = 1 << 20  # bytes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


@functools.cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes, libc.malloc_trim.restype = [ctypes.c_size_t], ctypes.c_int
        libc.mallopt.argtypes, libc.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    except (OSError, AttributeError):
        return None
    return libc


def return_large() -> None:
    """Return large blocks (bodies, texts) as soon as they are free, from now on. By default glibc raises its threshold."""
    if (libc := _libc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)


def give_back() -> None:
    """Return the memory of many small blocks as well. Takes some milliseconds, in which other threads can run."""
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


def forget_frames(error: BaseException) -> None:
    """Release the frames of an error that was answered, and with them objects such as the request's body.

    An error from a thread or a task is part of a cycle (error, traceback, frame, future, error). It would stay until the
    garbage collector runs, which is seldom here, and a hundred refused bodies of 30 MB would stay with it.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [one.__context__, one.__cause__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
