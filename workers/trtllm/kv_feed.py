"""Hands the polled KV events on to one reader per rank, in numbered batches, and keeps the last ones for a replay."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.trtllm.kv_events import CacheLedger

KEPT_BATCHES = 4096


class KvFeed:
    """The batches of one rank, numbered from 0. A reader that falls further behind than is kept begins anew."""

    def __init__(self, ledger: CacheLedger, kept: int = KEPT_BATCHES) -> None:
        self._ledger = ledger
        self._kept: deque[KvBatch] = deque(maxlen=kept)
        self._number = -1  # of the last batch
        self._more = asyncio.Event()

    def put(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Apply the events of one poll and make a batch of them if they change anything."""
        changes = self._ledger.apply(events)
        if not changes.events:
            return
        self._number += 1
        cleared = changes.events[0].kind == "cleared"
        self._kept.append(KvBatch(changes.events, self._number, partial=cleared and self._ledger.partial))
        self._more.set()

    def inventory(self) -> list[KvEvent]:
        """Return `stored` events for all that the rank has cached."""
        return self._ledger.inventory()

    def replay(self, start: int) -> list[KvBatch]:
        """Return the kept batches from number `start` on."""
        return [batch for batch in self._kept if batch.number >= start]

    def _everything(self) -> KvBatch:
        return KvBatch([KvEvent(kind="cleared"), *self._ledger.inventory()], self._number, partial=self._ledger.partial)

    async def read(self) -> AsyncGenerator[KvBatch]:
        """Yield everything that is cached now, and then each batch."""
        seen = self._number
        yield self._everything()
        while True:
            if seen < self._number:
                waiting = self.replay(seen + 1)
                if waiting[0].number != seen + 1:  # the reader fell behind what is kept
                    waiting = [self._everything()]
                for batch in waiting:
                    seen = batch.number
                    yield batch
                continue
            self._more.clear()
            await self._more.wait()


class KvFeeds:
    """The feeds of an engine's attention data-parallel ranks. `adapters`: the names by the engine's numbers."""

    def __init__(self, block_size: int, adapters: Mapping[int, str] | None = None, *, ranks: int = 1) -> None:
        self._feeds = [KvFeed(CacheLedger(block_size, adapters, rank=rank if ranks > 1 else None)) for rank in range(ranks)]

    def __getitem__(self, rank: int) -> KvFeed:
        return self._feeds[rank]

    def put(self, events: Sequence[Any]) -> None:
        """Apply the events of one poll, each to its rank. One that names no rank of the engine makes all ranks uncertain."""
        for rank, feed in enumerate(self._feeds):
            feed.put([event for event in events if self._rank_of(event) in (rank, None)])

    def _rank_of(self, event: Any) -> int | None:
        """Return the rank of an event; None if no rank can be read, which the ledgers then find malformed."""
        if not isinstance(event, Mapping):
            return None
        rank = event.get("attention_dp_rank")
        if rank is None:
            return 0
        return rank if isinstance(rank, int) and rank < len(self._feeds) else None
