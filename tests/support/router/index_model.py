"""The index in the fewest words: a set of (worker, plane, block). What the index is compared with, compiled and interpreted."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

from headrace.router.index.types import ASSUMED, PLANE_OF, BlockTable, Overlap, Tier

IMPLEMENTATIONS = ["pure", *(["compiled"] if importlib.util.find_spec("headrace.router.index._blocks") else [])]


class ModelIndex:
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.entries: set[tuple[str, int, int]] = set()

    def add_worker(self, worker: str) -> None:
        self.names.add(worker)

    def drop_worker(self, worker: str) -> None:
        self.clear(worker)
        self.names.discard(worker)

    def store(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        self.entries |= {(worker, PLANE_OF[tier], block) for block in blocks}

    def remove(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        self.entries -= {(worker, PLANE_OF[tier], block) for block in blocks}

    def assume(self, worker: str, blocks: Sequence[int]) -> None:
        self.entries |= {(worker, ASSUMED, block) for block in blocks}

    def unassume(self, worker: str, blocks: Sequence[int]) -> None:
        self.entries -= {(worker, ASSUMED, block) for block in blocks}

    def clear(self, worker: str) -> None:
        self.entries = {entry for entry in self.entries if entry[0] != worker}

    def evict(self, gone: Sequence[int]) -> None:
        self.entries = {entry for entry in self.entries if entry[2] not in set(gone)}

    def match_worker(self, worker: str, chain: Sequence[int]) -> Overlap:
        reach = []
        for planes in REACHES:
            n = 0
            while n < len(chain) and any((worker, plane, chain[n]) in self.entries for plane in planes):
                n += 1
            reach.append(n)
        return Overlap(reach[0], reach[1] - reach[0], reach[2] - reach[1])

    def match(self, chain: Sequence[int]) -> dict[str, Overlap]:
        found = {worker: self.match_worker(worker, chain) for worker in self.names}
        return {worker: overlap for worker, overlap in found.items() if overlap.blocks}

    def blocks(self, worker: str, tier: Tier) -> list[int]:
        return sorted(block for name, plane, block in self.entries if (name, plane) == (worker, PLANE_OF[tier]))


REACHES = ((0, ASSUMED), (0, ASSUMED, 1), (0, ASSUMED, 1, 2))  # planes that count for device, with host, with disk


def reaches(overlap: Overlap) -> tuple[int, int, int]:
    return (overlap.device, overlap.device + overlap.host, overlap.blocks)


def check_ends(found: Mapping[str, Overlap], model: ModelIndex, chain: Sequence[int]) -> None:
    """What `match` promises even for workers with holes: never too short, and both sides of each end are true."""
    exact = model.match(chain)
    assert found.keys() == exact.keys()
    for worker, overlap in found.items():
        for planes, end, least in zip(REACHES, reaches(overlap), reaches(exact[worker]), strict=True):
            assert end >= least
            assert end == 0 or any((worker, plane, chain[end - 1]) in model.entries for plane in planes)
            assert end == len(chain) or not any((worker, plane, chain[end]) in model.entries for plane in planes)


def dumped(index: BlockTable, worker: str, tier: Tier) -> list[int]:
    return sorted(memoryview(index.blocks(worker, tier)).cast("Q").tolist())
