"""Reads an engine's cache events in order and keeps the inventory; what is lost on the way is repaired here.

Batches have numbers.  After a gap the engine is asked for what is missing; if it does not have it any more, or if the events
contradict themselves (a block whose parent nobody has heard of), its cache is read anew, which begins with everything that is
there.  While nothing can be read the inventory is empty: a worker that knows nothing must not be believed to hold something.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from headrace.broker.errors import WireError
from headrace.workers import metrics
from headrace.workers.engine import Engine, KvBatch, KvEvent
from headrace.workers.errors import EngineDead, WorkerError
from headrace.workers.kv.translator import Change, Translator

log = structlog.get_logger()

READ_AGAIN_S = 1.0  # at most so often is the cache read anew
MISTRUST_S = 10.0  # … and so often because of a contradiction


class KvFeed:
    """From one engine to one taker of changes."""

    def __init__(self, engine: Engine, translator: Translator, take: Callable[[Change], None]) -> None:
        self._engine = engine
        self._translator = translator
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._next: int | None = None  # number of the batch to come; None: of whatever comes
        self._mistrusted_s = -MISTRUST_S
        self._seen = (0, 0, 0, 0)

    async def run(self) -> None:
        """Read until cancelled, or until the engine is dead."""
        while True:
            try:
                await self._read()
            except EngineDead as error:
                log.info("kv.feed_ended", reason=str(error))
                return
            except (WorkerError, WireError) as error:
                metrics.KV_TROUBLE.labels("unreadable").inc()
                log.error("kv.feed_failed", error=str(error))
                self._apply(KvBatch([KvEvent(kind="cleared")], -1, partial=True))
            await asyncio.sleep(READ_AGAIN_S)

    async def _read(self) -> None:
        """Returns when the cache has to be read anew."""
        self._next = None
        async with contextlib.aclosing(self._engine.kv_events()) as batches:
            async for batch in batches:
                if not await self._arrived(batch) or self._contradicted():
                    return

    async def _arrived(self, batch: KvBatch) -> bool:
        """False: something is missing and cannot be had."""
        fresh = bool(batch) and batch[0].kind == "cleared"
        if self._next is None or (fresh and batch.number >= self._next - 1) or batch.number == self._next:
            self._apply(batch)
            return True
        if batch.number < self._next:
            return True  # it came late and has been replayed already
        return await self._repair(self._next, batch)

    async def _repair(self, start: int, batch: KvBatch) -> bool:
        missing = await self._engine.replay_kv(start)
        metrics.KV_TROUBLE.labels("gap").inc()
        log.warning("kv.gap", expected=start, number=batch.number, replayed=len(missing))
        for one in (*missing, batch):
            if one.number == self._next:
                self._apply(one)
        if self._next is not None and batch.number < self._next:
            return True
        metrics.KV_TROUBLE.labels("gap_not_repaired").inc()
        return False

    def _apply(self, batch: KvBatch) -> None:
        change = self._translator.apply(batch)
        self._next = batch.number + 1
        self._take(change)
        odd = self._translator.odd
        seen = (odd.unplaced, odd.orphans, odd.unknown_removed, odd.odd_sizes)
        if seen != self._seen:
            self._report(seen)

    def _report(self, seen: tuple[int, int, int, int]) -> None:
        names = ("unplaced", "orphan", "unknown_removed", "odd_size")
        for name, now, before in zip(names, seen, self._seen, strict=True):
            if now > before:
                metrics.KV_TROUBLE.labels(name).inc(now - before)
        if seen[3] and not self._seen[3]:
            log.error("kv.block_size", got=self._translator.odd_size, expected=self._translator.block_size)
        self._seen = seen

    def _contradicted(self) -> bool:
        """True: the events do not fit what is known; read the cache anew, but not for ever in a circle."""
        if not self._translator.lost:
            return False
        if self._loop.time() < self._mistrusted_s + MISTRUST_S:
            return False
        self._mistrusted_s = self._loop.time()
        metrics.KV_TROUBLE.labels("read_anew").inc()
        log.warning("kv.unknown_parent", orphans=self._translator.odd.orphans)
        return True
