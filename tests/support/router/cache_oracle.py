"""The plainest index and view that can be right: sets. What the real ones are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from headrace.broker.codec import pack_u64
from headrace.router.errors import UnknownWorker
from headrace.router.index.types import TIERS, Overlap, Tier


class OracleIndex:
    """Satisfies `PrefixIndex`."""

    def __init__(self) -> None:
        self.held: dict[str, dict[Tier, set[int]]] = {}

    def add_worker(self, worker: str) -> None:
        self.held.setdefault(worker, {tier: set() for tier in TIERS})

    def drop_worker(self, worker: str) -> None:
        self.held.pop(worker, None)

    def workers(self) -> Sequence[str]:
        return list(self.held)

    def store(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        self._of(worker)[tier].update(blocks)

    def remove(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        self._of(worker)[tier].difference_update(blocks)

    def clear(self, worker: str) -> None:
        for held in self._of(worker).values():
            held.clear()

    def match(self, chain: Sequence[int]) -> Mapping[str, Overlap]:
        found = {worker: self.match_worker(worker, chain) for worker in self.held}
        return {worker: overlap for worker, overlap in found.items() if overlap.blocks}

    def match_worker(self, worker: str, chain: Sequence[int]) -> Overlap:
        held = self._of(worker)
        reach: list[int] = []
        usable: set[int] = set()
        for tier in TIERS:
            usable = usable | held[tier]
            length = 0
            while length < len(chain) and chain[length] in usable:
                length += 1
            reach.append(length)
        return Overlap(reach[0], reach[1] - reach[0], reach[2] - reach[1])

    def blocks(self, worker: str, tier: Tier) -> bytes:
        return pack_u64(sorted(self._of(worker)[tier]))

    def iter_blocks(self, worker: str, tier: Tier, size: int) -> Iterator[bytes]:
        held = iter(self._of(worker)[tier])
        while some := list(islice(held, size)):
            yield pack_u64(some)

    def count(self, worker: str) -> int:
        return sum(len(held) for held in self._of(worker).values())

    def __len__(self) -> int:
        return sum(self.count(worker) for worker in self.held)

    def _of(self, worker: str) -> dict[Tier, set[int]]:
        try:
            return self.held[worker]
        except KeyError:
            raise UnknownWorker(f"there is no worker {worker!r} in the index") from None


class OracleView:
    """Satisfies `CacheView` as far as blocks by events go; predictions and waiting requests are not its business."""

    def __init__(self) -> None:
        self.index = OracleIndex()
        self.approximate: set[str] = set()

    def add_worker(self, worker: str, *, approximate: bool = False, capacity_blocks: int = 0) -> None:
        self.index.add_worker(worker)
        (self.approximate.add if approximate else self.approximate.discard)(worker)

    def drop_worker(self, worker: str) -> None:
        self.index.drop_worker(worker)
        self.approximate.discard(worker)

    def apply(
        self,
        worker: str,
        *,
        cleared: bool = False,
        removed: Mapping[Tier, Sequence[int]],
        stored: Mapping[Tier, Sequence[int]],
        now_s: float,
    ) -> None:
        if cleared:
            self.index.clear(worker)
        for tier, blocks in removed.items():
            self.index.remove(worker, tier, blocks)
        for tier, blocks in stored.items():
            self.index.store(worker, tier, blocks)

    def replace(self, worker: str, blocks: Mapping[Tier, Sequence[int]], *, now_s: float) -> None:
        self.apply(worker, cleared=True, removed={}, stored=blocks, now_s=now_s)

    def predict(self, worker: str, blocks: Sequence[int], *, now_s: float) -> None: ...
    def expire(self, now_s: float) -> None: ...
    def track(self, request_id: str, chain: Sequence[int]) -> None: ...
    def untrack(self, request_id: str) -> None: ...
    def overlaps(self, request_id: str) -> Mapping[str, Overlap]:
        return {}

    def verify(self, worker: str, chain: Sequence[int]) -> Overlap:
        return self.index.match_worker(worker, chain)


def contents(index: OracleIndex) -> dict[str, dict[Tier, frozenset[int]]]:
    """What workers with blocks hold, to be compared."""
    return {
        worker: {tier: frozenset(blocks) for tier, blocks in held.items() if blocks}
        for worker, held in index.held.items()
        if any(held.values())
    }
