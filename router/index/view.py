"""View of all caches of a pool for the scheduler: `headrace.router.index.types.CacheView`.

A block counts for a worker if an event said so, or if a request with it was placed there a moment ago and no event has
confirmed it yet.  A worker without events has only the second kind, for longer.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import structlog

from headrace.router.errors import SettingsInvalid, UnknownWorker
from headrace.router.index.blocks import Blocks, Words
from headrace.router.index.overlap_cache import OverlapCache
from headrace.router.index.table import PrefixTable
from headrace.router.index.types import BlockTable, OnEvict, Overlap, Tier

Implementation = Literal["auto", "compiled", "pure"]
IMPLEMENTATION_VARIABLE = "HEADRACE_INDEX"  # overrides what the caller asks for

_log = structlog.get_logger(__name__)


def create_index(
    implementation: Implementation = "auto", *, max_entries: int = 0, on_evict: OnEvict | None = None
) -> BlockTable:
    """Make an empty index of at most `max_entries` entries (block, worker, tier); 0 = no limit.

    `auto` takes the compiled one if it can be loaded. Raises SettingsInvalid for `compiled` where it was not built, for
    another name and for a negative limit.
    """
    wanted = os.environ.get(IMPLEMENTATION_VARIABLE) or implementation
    if wanted not in get_args(Implementation):
        raise SettingsInvalid(f"index implementation {wanted!r} is none of {', '.join(get_args(Implementation))}")
    if max_entries < 0:
        raise SettingsInvalid(f"an index cannot hold {max_entries} entries")
    table, blocks, words = PrefixTable, Blocks, Words
    if wanted != "pure":
        try:
            memory = importlib.import_module("headrace.router.index._blocks")
            compiled = importlib.import_module("headrace.router.index._table")
            table, blocks, words = compiled.PrefixTable, memory.Blocks, memory.Words
        except (ImportError, ValueError) as error:  # ValueError: its parts were not built together
            if wanted == "compiled":
                raise SettingsInvalid(f"the compiled index was not built: {error}") from error
            _log.warning("index.not_compiled", reason=str(error))
    index = table(blocks, words, max_entries=max_entries, on_evict=on_evict)
    _log.info("index.created", implementation=index.implementation, max_entries=max_entries)
    return index


_SLACK = 16_384  # blocks that placements may name beyond four times those that are assumed


class PredictedBlocks:
    """Ages blocks by time since they were last placed, and by capacity: those placed longest ago go first, tails before heads.

    `ttl_s` and `capacity` (blocks, 0 = no limit) may be changed at any time; `trim` makes a smaller capacity true. Placements
    are kept whole, in order, because that costs a fraction of an order of blocks.
    """

    __slots__ = ("_named", "_placed", "_placements", "_turn", "capacity", "ttl_s")

    def __init__(self, ttl_s: float, *, capacity: int = 0) -> None:
        self.ttl_s = ttl_s
        self.capacity = capacity
        self._turn = 0
        self._placed: dict[int, int] = {}  # block → turn in which it was placed last
        self._placements: deque[tuple[int, float, Sequence[int]]] = deque()  # turn, when, blocks
        self._named = 0  # blocks in all placements

    def __len__(self) -> int:
        return len(self._placed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._placed)

    def place(self, blocks: Sequence[int], now_s: float) -> list[int]:
        """Place blocks. Return those that have to go for them: some of the new ones, if they do not fit by themselves."""
        self._turn += 1
        self._placed.update(dict.fromkeys(blocks, self._turn))
        self._placements.append((self._turn, now_s, tuple(blocks)))
        self._named += len(blocks)
        if self._named > 4 * len(self._placed) + _SLACK:
            self._tidy()
        return self.trim()

    def trim(self) -> list[int]:
        gone: list[int] = []
        while self.capacity and len(self._placed) > self.capacity:
            turn, placed_s, blocks = self._placements.popleft()
            self._named -= len(blocks)
            left = len(blocks)
            while left and len(self._placed) > self.capacity:
                left -= 1
                if self._placed.get(blocks[left]) == turn:
                    del self._placed[blocks[left]]
                    gone.append(blocks[left])
            if left:
                self._placements.appendleft((turn, placed_s, blocks[:left]))
                self._named += left
        return gone

    def confirm(self, blocks: Iterable[int]) -> list[int]:
        if not self._placed:
            return []
        known = list(self._placed.keys() & blocks)
        for block in known:
            del self._placed[block]
        return known

    def expire(self, now_s: float) -> list[int]:
        gone: list[int] = []
        while self.next_s() <= now_s:
            turn, _, blocks = self._placements.popleft()
            self._named -= len(blocks)
            old = [block for block in blocks if self._placed.get(block) == turn]
            for block in old:
                self._placed.pop(block, None)
            gone += old
        return gone

    def next_s(self) -> float:
        return self._placements[0][1] + self.ttl_s if self._placements else float("inf")

    def clear(self) -> None:
        self._placed.clear()
        self._placements.clear()
        self._named = 0

    def _tidy(self) -> None:
        placements = ((turn, at, [b for b in blocks if self._placed.get(b) == turn]) for turn, at, blocks in self._placements)
        self._placements = deque(entry for entry in placements if entry[2])
        self._named = sum(len(blocks) for _, _, blocks in self._placements)


class Caches:
    """Keeps index, predictions and waiting requests in step.

    A placed block counts unconfirmed for `predicted_ttl_s`, and for `approximate_ttl_s` where no events come.

    The index (without one: a new, unlimited one) belongs to it from now on: changes made beside it go unnoticed by `overlaps`.
    An `on_evict` that it has is called as before.
    """

    def __init__(
        self, index: BlockTable | None = None, *, predicted_ttl_s: float = 2.0, approximate_ttl_s: float = 120.0
    ) -> None:
        index = create_index() if index is None else index
        self.index = index
        self.predicted_ttl_s = predicted_ttl_s
        self.approximate_ttl_s = approximate_ttl_s
        self._chains = OverlapCache(index)
        self._assumed: dict[str, PredictedBlocks] = {}
        self._approximate: set[str] = set()
        self._next_expiry_s = float("inf")  # nothing expires before
        self._also_on_evict = index.on_evict
        index.on_evict = self._evicted
        for worker in index.workers():  # it may come from a snapshot
            self._assumed[worker] = PredictedBlocks(predicted_ttl_s)

    # Workers.

    def add_worker(self, worker: str, *, approximate: bool = False, capacity_blocks: int = 0) -> None:
        self.index.add_worker(worker)
        assumed = self._assumed.setdefault(worker, PredictedBlocks(self.predicted_ttl_s))
        if approximate and worker not in self._approximate and self.index.count(worker):
            # Blocks that are known by events would never age.
            self.index.clear(worker)
            self.index.assume(worker, list(assumed))
            self._chains.touched_all(worker)
        if approximate:
            self._approximate.add(worker)
        else:
            self._approximate.discard(worker)
        assumed.ttl_s = self.approximate_ttl_s if approximate else self.predicted_ttl_s
        assumed.capacity = capacity_blocks if approximate else 0
        self._next_expiry_s = min(self._next_expiry_s, assumed.next_s())
        self._unassume(worker, assumed.trim())

    def drop_worker(self, worker: str) -> None:
        self.index.drop_worker(worker)
        self._assumed.pop(worker, None)
        self._approximate.discard(worker)
        self._chains.touched_all(worker)

    @property
    def approximate(self) -> frozenset[str]:
        return frozenset(self._approximate)

    # What they hold.

    def apply(
        self,
        worker: str,
        *,
        cleared: bool = False,
        removed: Mapping[Tier, Sequence[int]],
        stored: Mapping[Tier, Sequence[int]],
        now_s: float,
    ) -> None:
        assumed = self._predictions(worker)
        if cleared:
            self._clear(worker, assumed)
        for tier, blocks in removed.items():
            self.index.remove(worker, tier, blocks)
            self._chains.touched(worker, blocks)
        for tier, blocks in stored.items():
            self.index.store(worker, tier, blocks)
            if tier == "device" and (confirmed := assumed.confirm(blocks)):
                self.index.unassume(worker, confirmed)
            self._chains.touched(worker, blocks)

    def replace(self, worker: str, blocks: Mapping[Tier, Sequence[int]], *, now_s: float) -> None:
        self._clear(worker, self._predictions(worker))
        for tier, values in blocks.items():
            self.index.store(worker, tier, values)

    def predict(self, worker: str, blocks: Sequence[int], *, now_s: float) -> None:
        assumed = self._assumed.get(worker)
        if assumed is None or not len(blocks):
            return
        too_many = assumed.place(blocks, now_s)
        self.index.assume(worker, blocks)
        self._chains.touched(worker, blocks)
        self._unassume(worker, too_many)
        self._next_expiry_s = min(self._next_expiry_s, now_s + assumed.ttl_s)

    def expire(self, now_s: float) -> None:
        if now_s < self._next_expiry_s:
            return
        for worker, assumed in self._assumed.items():
            self._unassume(worker, assumed.expire(now_s))
        self._next_expiry_s = min((assumed.next_s() for assumed in self._assumed.values()), default=float("inf"))

    # Requests that wait.

    def track(self, request_id: str, chain: Sequence[int]) -> None:
        self._chains.track(request_id, chain)

    def untrack(self, request_id: str) -> None:
        self._chains.untrack(request_id)

    def overlaps(self, request_id: str) -> Mapping[str, Overlap]:
        """Return the current overlaps of a request. Raises KeyError if it is not tracked."""
        return self._chains.overlaps(request_id)

    def refresh(self, request_id: str) -> Collection[str] | None:
        return self._chains.refresh(request_id)

    def stale(self) -> Collection[str]:
        return self._chains.stale()

    def lookup(self, chain: Sequence[int]) -> Mapping[str, Overlap]:
        return self.index.match_exact(chain) if len(chain) else {}

    def verify(self, worker: str, chain: Sequence[int]) -> Overlap:
        """Return the overlap of a worker with every block compared. Raises UnknownWorker."""
        return self.index.match_worker(worker, chain)

    # Figures, for metrics.

    @property
    def tracked(self) -> int:
        return len(self._chains)

    @property
    def watched_blocks(self) -> int:
        return self._chains.watched

    # Parts.

    def _predictions(self, worker: str) -> PredictedBlocks:
        assumed = self._assumed.get(worker)
        if assumed is None:
            raise UnknownWorker(f"the caches have no worker {worker!r}")
        return assumed

    def _clear(self, worker: str, assumed: PredictedBlocks) -> None:
        """Drop predictions too: they are void for a cache that was emptied or an engine that has restarted."""
        self.index.clear(worker)
        assumed.clear()
        self._chains.touched_all(worker)

    def _unassume(self, worker: str, blocks: Sequence[int]) -> None:
        if blocks:
            self.index.unassume(worker, blocks)
            self._chains.touched(worker, blocks)

    def _evicted(self, blocks: list[int]) -> None:
        self._chains.evicted(blocks)
        if self._also_on_evict is not None:
            self._also_on_evict(blocks)
