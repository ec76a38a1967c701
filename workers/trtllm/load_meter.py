"""Makes load reports from the iteration statistics that TensorRT-LLM reports.

A row is `{"numActiveRequests", "numQueuedRequests", "iterLatencyMS", "kvCacheStats": {"maxNumBlocks", "usedNumBlocks", …},
"inflightBatchingStats": {"numCtxTokens", "numContextRequests", "numGenRequests", …}, "attentionDpRank"?}`; with attention data
parallelism 1.3 makes one per rank, and 1.2 makes those of rank 0 alone, which are taken for the others too. `kvCacheStats` may
be null.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.workers.engine import Load

FRESH_S = 1.0  # older statistics say nothing about what runs now


@dataclass(frozen=True, slots=True)
class RankRow:
    """The last iteration of a rank."""

    active: int = 0
    waiting: int = 0
    blocks: int = 0
    used: int = 0
    step_s: float = 0.0
    prefill_tokens: int = 0
    decodes: int = 0

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> RankRow:
        cache = row.get("kvCacheStats") or {}
        batch = row.get("inflightBatchingStats") or {}
        return cls(
            active=int(row.get("numActiveRequests") or 0),
            waiting=int(row.get("numQueuedRequests") or 0),
            blocks=int(cache.get("maxNumBlocks") or 0),
            used=int(cache.get("usedNumBlocks") or 0),
            step_s=float(row.get("iterLatencyMS") or 0.0) / 1000,
            prefill_tokens=int(batch.get("numCtxTokens") or 0),
            decodes=int(batch.get("numGenRequests") or 0),
        )


class LoadMeter:
    """The last statistics of each rank, and the prompts that have no token yet."""

    def __init__(self, ranks: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._clock = clock
        self._rows: dict[int, RankRow] = {}
        self._at = float("-inf")
        self._queue: dict[str, tuple[int | None, int]] = {}  # sequence without a token → its rank, prompt tokens to be computed
        self._queued: Counter[int | None] = Counter()  # these tokens by rank; None: the engine chooses the rank

    @property
    def blocks(self) -> int:
        """Return the blocks of all ranks, 0 while no statistics have told them."""
        return sum(row.blocks for row in self._rows.values())

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record statistics in the order in which they were polled."""
        for row in rows:
            number = row.get("attentionDpRank")
            self._rows |= dict.fromkeys(range(self._ranks) if number is None else (int(number),), RankRow.read(row))
            self._at = self._clock()

    def queued(self, sequence_id: str, tokens: int, *, rank: int | None = None) -> None:
        """Record a submitted sequence of which `tokens` are to be computed."""
        self._queue[sequence_id] = rank, max(0, tokens)
        self._queued[rank] += max(0, tokens)

    def gone(self, sequence_id: str) -> None:
        """Record that a sequence has its first token, or has ended."""
        rank, tokens = self._queue.pop(sequence_id, (None, 0))
        self._queued[rank] -= tokens

    def read(self, *, mine: int, blocks: int, slots: int) -> Load:
        """Return the load. `mine` is the number of sequences in the engine; the statistics of an idle one are stale."""
        if mine == 0:
            return self._idle(blocks)
        rows = self._rows.values()
        fresh = self._clock() - self._at <= FRESH_S
        active = sum(row.active for row in rows) if fresh else slots
        running = min(active, mine)
        return Load(
            running=running,
            waiting=mine - running,
            blocks_used=sum(row.used for row in rows),
            blocks_total=blocks,
            queued_prefill_tokens=self._queued.total(),
            step_s=max((row.step_s for row in rows), default=0.0),
            step_prefill_tokens=sum(row.prefill_tokens for row in rows),
            step_decodes=sum(row.decodes for row in rows),
            ranks=tuple(self._rank(rank, blocks // self._ranks) for rank in range(self._ranks)) if self._ranks > 1 else (),
        )

    def _idle(self, blocks: int) -> Load:
        """Return the load of an engine without sequences."""
        part = Load(blocks_total=blocks // self._ranks)
        return Load(blocks_total=blocks, ranks=(part,) * self._ranks if self._ranks > 1 else ())

    def _rank(self, rank: int, blocks: int) -> Load:
        """Return the load of a rank by its last statistics. Prompts without a rank are shared out evenly."""
        row = self._rows.get(rank, RankRow())
        return Load(
            running=row.active,
            waiting=row.waiting,
            blocks_used=row.used,
            blocks_total=blocks,
            queued_prefill_tokens=self._queued[rank] + self._queued[None] // self._ranks,
            step_s=row.step_s,
            step_prefill_tokens=row.prefill_tokens,
            step_decodes=row.decodes,
        )
