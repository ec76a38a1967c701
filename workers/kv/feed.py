"""Reads an engine's cache events in order, repairs gaps, and passes on the changes of the inventory.

Batches are numbered. After a gap the engine is asked for the missing batches; if it no longer keeps them, or if the events
contradict themselves (a block with an unknown parent), its cache is read anew, which begins with all cached blocks. While
nothing can be read the inventory is empty, because routers must not count on blocks that may be gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from headrace.broker.errors import WireError
from headrace.workers import metrics
from headrace.workers.engine import Engine, KvBatch, KvEvent, Tier
from headrace.workers.errors import EngineDead, WorkerError
from headrace.workers.kv.translator import CacheChange, Translator


def cached_tokens(chain: Sequence[int], tokens: int, *, block_size: int, cache: Container[int], engine_block: int = 0) -> int:
    """Return the tokens of the longest prefix in `cache`, in whole blocks. At least one token is left to be computed.

    `block_size`: tokens of the chain's blocks. `engine_block`: those of the engine's, a multiple of that, 0 = the same; a part
    of one is of no use.  Nothing is known (0) of an engine whose blocks are no multiple.
    """
    whole = engine_block or block_size
    if block_size < 1 or whole % block_size:
        return 0
    blocks = min(len(chain), (tokens - 1) // whole * (whole // block_size))
    for n in range(blocks):
        if chain[n] not in cache:
            blocks = n
            break
    return blocks * block_size // whole * whole


log = structlog.get_logger()


class BatchReader:
    """Reads the batches of one engine. `decoder` gives an object with `events`, `to_event` translates one of them."""

    def __init__(self, engine: str, decoder: msgspec.msgpack.Decoder[Any], to_event: Callable[[Any], KvEvent]) -> None:
        self._engine = engine
        self._decoder = decoder
        self._to_event = to_event

    def read(self, number: int, payload: bytes) -> KvBatch:
        """Read the events of a step. An unreadable batch becomes `cleared`, because the known state is unreliable after it."""
        try:
            return KvBatch(map(self._to_event, self._decoder.decode(payload).events), number)
        except (msgspec.DecodeError, ValueError) as error:
            metrics.KV_TROUBLE.labels("malformed").inc()
            log.error("kv.malformed", engine=self._engine, number=number, error=str(error))
            return KvBatch([KvEvent(kind="cleared")], number, partial=True)


def tier_of(medium: str | None, tiers: Mapping[str, Tier]) -> Tier:
    """Return the tier of an engine's medium; without one it is the device. Raises ValueError for an unknown medium."""
    if medium is None:
        return "device"
    tier = tiers.get(medium)
    if tier is None:
        raise ValueError(f"medium {medium!r} is unknown; known: {', '.join(tiers)}")
    return tier


READ_AGAIN_S = 1.0  # least time between two readings of the cache
MISTRUST_S = 10.0  # least time between two readings because of a contradiction


class KvFeed:
    """Feeds the cache events of one rank of an engine to a translator, and the resulting changes to a callback."""

    def __init__(
        self, engine: Engine, translator: Translator, on_change: Callable[[CacheChange], None], *, rank: int = 0
    ) -> None:
        self._engine = engine
        self._rank = rank
        self._translator = translator
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._next: int | None = None  # expected number of the next batch; None: any number
        self._mistrusted_s = -MISTRUST_S
        self._seen = (0, 0, 0, 0)

    async def run(self) -> None:
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
        """Read batches. Returns when the cache has to be read anew."""
        self._next = None
        async with contextlib.aclosing(self._engine.kv_events(self._rank)) as batches:
            async for batch in batches:
                if not await self._on_batch(batch) or self._contradicted():
                    return

    async def _on_batch(self, batch: KvBatch) -> bool:
        """Apply a batch, after a gap with the missing ones. Returns False if the engine no longer keeps those."""
        fresh = bool(batch) and batch[0].kind == "cleared"
        if self._next is None or (fresh and batch.number >= self._next - 1) or batch.number == self._next:
            self._apply(batch)
            return True
        if batch.number < self._next:
            return True  # The batch came late and has been replayed already.
        return await self._repair(self._next, batch)

    async def _repair(self, start: int, batch: KvBatch) -> bool:
        missing = await self._engine.replay_kv(start, self._rank)
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
        self._on_change(change)
        odd = self._translator.anomalies
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
        """Return whether to read the cache anew because the events contradict it, at most once in `MISTRUST_S` seconds."""
        if not self._translator.lost:
            return False
        if self._loop.time() < self._mistrusted_s + MISTRUST_S:
            return False
        self._mistrusted_s = self._loop.time()
        metrics.KV_TROUBLE.labels("read_anew").inc()
        log.warning("kv.unknown_parent", orphans=self._translator.anomalies.orphans)
        return True
