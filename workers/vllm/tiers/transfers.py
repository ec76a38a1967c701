"""Moves blocks between the host tier and a store behind it, in a thread of its own, so that the scheduler never waits.

A request may wait for a store, but not for long: looking blocks up and loading them have a deadline each, and what has not come
by then is computed. Blocks on their way into the store are copied out of the host tier first, into bounded memory; what finds
no room there is not stored. A store that has failed is left alone for a while.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import structlog

from headrace.workers.vllm.tiers.block_record import DamagedBlock, seal, unseal
from headrace.workers.vllm.tiers.block_store import BlockAbsent, BlockStore
from headrace.workers.vllm.tiers.breaker import FIRST_S, Breaker

log = structlog.get_logger()

R = TypeVar("R")

Trouble = Literal["failed", "late", "damaged", "dropped", "left_alone"]
TROUBLES: tuple[Trouble, ...] = ("failed", "late", "damaged", "dropped", "left_alone")

_FLUSH_S = 2.0  # how long a closing tier goes on to store what it has accepted
_STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the cost of a store. `wait_s`: most time that a look-up, and again a load, makes a request wait."""

    wait_s: float = 2.0
    write_s: float = 30.0
    buffer_bytes: int = 256 << 20  # of blocks that are on their way into the store
    readers: int = 8
    writers: int = 4
    pause_s: float = FIRST_S  # for which a store that has failed is left alone, and twice as long after each further failure


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load: the names that are in their places. `of`: how many were asked for."""

    job: int
    names: Sequence[str]
    of: int
    took_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that a store has taken or let go."""

    names: Sequence[str]
    removed: bool


class Transfers:
    """The transfers of one store. All methods are for other threads than its own and return at once, but for `held`."""

    def __init__(
        self, store: BlockStore, *, size: int, limits: Limits | None = None, name: str = "store", tells: bool = True
    ) -> None:
        """`size`: bytes of a block. `name`: of the tier, in log lines. `tells`: whether `changes` are read by anything."""
        self.loaded: deque[Loaded] = deque()
        self.changes: deque[Change] = deque()
        self._store = store
        self._size = size
        self._limits = limits or Limits()
        self._name = name
        self._tells = tells
        self._troubles: Counter[Trouble] = Counter()
        self._buffered = 0
        self._queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._breaker = Breaker(self._loop.time, first_s=self._limits.pause_s)
        self._reading = asyncio.Semaphore(self._limits.readers)
        self._stopping = asyncio.Event()
        self._loads: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}", daemon=True)
        self._thread.start()

    # For other threads:

    def held(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the store has it, after `wait_s` at the latest. For a thread that may wait."""
        asked = self._call(self._held(names))
        try:
            found = asked.result(self._limits.wait_s * 2 + 1)  # a deadline for a loop that is busy
        except (concurrent.futures.CancelledError, TimeoutError):
            asked.cancel()
            found = ()
        return [name in found for name in names]

    def load(self, job: int, names: Sequence[str], places: Sequence[memoryview]) -> None:
        """Fill the places with these blocks. The end comes into `loaded`; no place is written to after that."""
        self._loop.call_soon_threadsafe(self._begin_load, job, names, places)

    def store(self, names: Sequence[str], blocks: Sequence[memoryview]) -> concurrent.futures.Future[None]:
        """Accept blocks into the store. The result comes when they were copied, or dropped, and may be overwritten."""
        return self._call(self._accept(names, blocks))

    def troubles(self) -> Counter[Trouble]:
        """Return what went wrong since the last call, by kind."""
        found, self._troubles = self._troubles, Counter()
        return found

    def drain(self) -> None:
        """Give up the loads that run. Their ends are in `loaded` afterwards."""
        self._call(self._drain()).result(_STOP_S)

    def close(self) -> None:
        """Store for a moment what was accepted, then end."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_S)

    def _call(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # In the thread:

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            writers = [group.create_task(self._write_on()) for _ in range(self._limits.writers)]
            await self._stopping.wait()
            await self._drain()
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await self._queue.join()
            except TimeoutError:
                log.info("kv_tier.not_stored", tier=self._name, blocks=self._queue.qsize())
            for writer in writers:
                writer.cancel()
        await self._store.close()

    async def _held(self, names: Sequence[str]) -> Collection[str]:
        if not self._breaker.closed:
            self._troubles["left_alone"] += 1
            return ()
        found: Collection[str] = ()
        async with self._bounded(self._limits.wait_s):
            found = await self._store.held(names)
            self._breaker.succeeded()
        return found

    def _begin_load(self, job: int, names: Sequence[str], places: Sequence[memoryview]) -> None:
        task = self._loop.create_task(self._load(job, names, places))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _load(self, job: int, names: Sequence[str], places: Sequence[memoryview]) -> None:
        """Load until the deadline. Blocks are copied in this thread, so none arrives after the end was told."""
        start = self._loop.time()
        arrived: set[str] = set()
        try:
            if self._breaker.closed:
                async with self._bounded(self._limits.wait_s), asyncio.TaskGroup() as group:
                    for name, place in zip(names, places, strict=True):
                        group.create_task(self._load_one(name, place, arrived))
            else:
                self._troubles["left_alone"] += 1
        finally:
            took_s = self._loop.time() - start
            self.loaded.append(Loaded(job, [name for name in names if name in arrived], len(names), took_s))

    async def _load_one(self, name: str, place: memoryview, arrived: set[str]) -> None:
        async with self._reading:
            try:
                place[:] = unseal(name, await self._store.read(name), size=self._size)
            except BlockAbsent:
                return
            except DamagedBlock as error:
                self._troubles["damaged"] += 1
                log.warning("kv_tier.damaged", tier=self._name, error=str(error))
                await self._store.remove(name)  # or it would be found, and refused, again and again
                self._tell([name], removed=True)
                return
            arrived.add(name)

    async def _accept(self, names: Sequence[str], blocks: Sequence[memoryview]) -> None:
        for name, block in zip(names, blocks, strict=True):
            if not self._breaker.closed or self._buffered + self._size > self._limits.buffer_bytes:
                self._troubles["dropped"] += 1
                continue
            self._buffered += self._size
            self._queue.put_nowait((name, seal(name, block)))
            await asyncio.sleep(0)

    async def _write_on(self) -> None:
        while True:
            name, record = await self._queue.get()
            try:
                async with self._bounded(self._limits.write_s):
                    await self._write(name, record)
            finally:
                self._buffered -= self._size
                self._queue.task_done()

    async def _write(self, name: str, record: bytes) -> None:
        if not self._breaker.closed:
            self._troubles["dropped"] += 1
            return
        if name in await self._store.held([name]):
            return
        gone = await self._store.write(name, record)
        self._breaker.succeeded()
        self._tell([name], removed=False)
        self._tell(gone, removed=True)

    def _tell(self, names: Sequence[str], *, removed: bool) -> None:
        if names and self._tells:
            self.changes.append(Change(names, removed))

    async def _drain(self) -> None:
        loads = list(self._loads)
        for load in loads:
            load.cancel()
        if loads:
            await asyncio.wait(loads)

    @contextlib.asynccontextmanager
    async def _bounded(self, longest_s: float) -> AsyncIterator[None]:
        """Run something with the store that may fail or be late, which is counted and costs nothing but that."""
        try:
            async with asyncio.timeout(longest_s):
                yield
        except* TimeoutError:
            self._trouble("late", f"no answer in {longest_s:g} s")
        except* Exception as errors:  # whatever it is: an answer must not depend on a store
            self._trouble("failed", str(errors.exceptions[0]))

    def _trouble(self, kind: Trouble, error: str) -> None:
        self._troubles[kind] += 1
        if self._breaker.closed:
            log.warning("kv_tier.trouble", tier=self._name, kind=kind, error=error)
        self._breaker.failed()
