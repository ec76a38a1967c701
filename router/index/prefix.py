"""The prefix index in pure Python: the reference for the compiled one, and its replacement where that is missing.

One dict per plane (tier or assumption) maps a block to the set of its workers, an int with a bit for each; beside it stands one
set of blocks per worker and plane, so that an operation on one worker costs as much as it has blocks.

An exact match walks the chain once and notes at which block each worker drops out.  A galloping one looks at a few blocks all
over the chain, then between two of them at a few more if a worker dropped out there, until it has both sides of every end.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from operator import or_

from headrace.router.errors import UnknownWorker
from headrace.router.index.types import ASSUMED, NO_OVERLAP, PLANES, ROUND, OnEvict, Overlap, Tier, plane_of

_EVENTS = range(ASSUMED)
_ZEROS = repeat(0)
_EVICT_SHARE = 32  # one part in so many is evicted at once: picking victims costs a pass over those evicted before
_CHUNK = 65_536  # so many blocks are stored before room is made for more


class PurePrefixIndex:
    """Implements `headrace.router.index.types.BlockTable`.

    It evicts the block that was stored or matched longest ago, tails before heads.
    """

    implementation = "pure"

    def __init__(self, *, max_entries: int = 0, on_evict: OnEvict | None = None) -> None:
        self.max_entries = max_entries
        self.on_evict = on_evict
        self.evicted = 0
        self._slots: dict[str, int] = {}
        self._names: list[str | None] = []
        self._tables: list[dict[int, int]] = [{} for _ in range(PLANES)]
        self._held: list[list[set[int]]] = []  # per slot and plane
        self._changes: list[int] = []  # per slot, of what it has by events
        self._entries = [0] * PLANES
        self._used: dict[int, None] = {}  # blocks, longest unused first; only kept where there is a limit

    # Workers.

    def add_worker(self, worker: str) -> None:
        if worker in self._slots:
            return
        slot = self._names.index(None) if None in self._names else len(self._names)
        if slot == len(self._names):
            self._names.append(None)
            self._held.append([set() for _ in range(PLANES)])
            self._changes.append(0)
        self._names[slot] = worker
        self._slots[worker] = slot

    def drop_worker(self, worker: str) -> None:
        if worker in self._slots:
            self.clear(worker)
            self._names[self._slots.pop(worker)] = None

    def workers(self) -> list[str]:
        return list(self._slots)

    # Blocks.

    def store(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        self._add(self._slot(worker), plane_of(tier), blocks)

    def remove(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        self._remove(self._slot(worker), plane_of(tier), blocks)

    def assume(self, worker: str, blocks: Sequence[int]) -> None:
        self._add(self._slot(worker), ASSUMED, blocks)

    def unassume(self, worker: str, blocks: Sequence[int]) -> None:
        self._remove(self._slot(worker), ASSUMED, blocks)

    def clear(self, worker: str) -> None:
        slot = self._slot(worker)
        for plane, held in enumerate(self._held[slot]):
            self._remove(slot, plane, list(held))
            self._held[slot][plane] = set()  # a set never gives back its memory

    def _add(self, slot: int, plane: int, blocks: Sequence[int]) -> None:
        table, held, bit = self._tables[plane], self._held[slot][plane], 1 << slot
        for start in range(0, len(blocks), _CHUNK):
            part = blocks[start : start + _CHUNK]
            fresh = dict.fromkeys(part, bit)
            for block in table.keys() & fresh.keys():
                fresh[block] |= table[block]
            table.update(fresh)
            before = len(held)
            held.update(fresh)
            self._entries[plane] += len(held) - before
            self._changes[slot] += plane != ASSUMED and len(held) != before
            if self.max_entries:
                self._touch(part)
                self._make_room()

    def _remove(self, slot: int, plane: int, blocks: Iterable[int]) -> None:
        table, held, others = self._tables[plane], self._held[slot][plane], ~(1 << slot)
        gone = held.intersection(blocks)
        held -= gone
        self._entries[plane] -= len(gone)
        self._changes[slot] += plane != ASSUMED and bool(gone)
        for block in gone:
            left = table[block] & others
            if left:
                table[block] = left
            else:
                del table[block]
                if self.max_entries and not any(block in other for other in self._tables):
                    del self._used[block]

    # Questions.

    def match(self, chain: Sequence[int]) -> dict[str, Overlap]:
        if not len(chain):
            return {}
        names = self._names
        if not self._tables[1] and not self._tables[2]:
            found = {}
            for at, gone in self._ends(chain):
                overlap = Overlap(at)
                for slot in _bits(gone):
                    if (name := names[slot]) is not None:
                        found[name] = overlap
            return found
        reach = {bit: at for at, gone in self._ends(chain) for bit in _bits(gone)}
        return self._named(*({slot: reach.get(tier * len(names) + slot, 0) for slot in range(len(names))} for tier in range(3)))

    def match_exact(self, chain: Sequence[int]) -> dict[str, Overlap]:
        if not len(chain):
            return {}
        device, host, disk, assumed = self._tables
        reach = {slot: at for at, gone in self._drop_outs((device, assumed), chain) for slot in _bits(gone)}
        with_disk = with_host = reach
        if host or disk:
            with_host = {slot: at for at, gone in self._drop_outs((device, assumed, host), chain) for slot in _bits(gone)}
            with_disk = {slot: at for at, gone in self._drop_outs((device, assumed, host, disk), chain) for slot in _bits(gone)}
        if self.max_entries:
            self._touch(chain[: max(with_disk.values(), default=0)])
        return self._named(reach, with_host, with_disk)

    def match_worker(self, worker: str, chain: Sequence[int]) -> Overlap:
        device, host, disk, assumed = self._held[self._slot(worker)]
        if not (device or host or disk or assumed):
            return NO_OVERLAP
        first = second = blocks = 0
        for block in chain:
            if block in device or block in assumed:
                first += first == blocks
                second += second == blocks
            elif block in host:
                second += second == blocks
            elif block not in disk:
                break
            blocks += 1
        if self.max_entries:
            self._touch(chain[:blocks])
        return Overlap(first, second - first, blocks - second)

    def blocks(self, worker: str, tier: Tier) -> bytes:
        values = array("Q", self._held[self._slot(worker)][plane_of(tier)])
        if sys.byteorder == "big":
            values.byteswap()
        return values.tobytes()

    def iter_blocks(self, worker: str, tier: Tier, size: int) -> Iterator[bytes]:
        slot, plane = self._slot(worker), plane_of(tier)
        if size < 1:
            raise ValueError(f"parts of {size} blocks")
        changes, held = self._changes[slot], iter(self._held[slot][plane])  # what was evicted shows in the set
        while values := array("Q", islice(held, size)):
            if sys.byteorder == "big":
                values.byteswap()
            yield values.tobytes()
            if self._changes[slot] != changes:
                raise RuntimeError(f"the blocks of worker {worker!r} changed while they were read")

    def count(self, worker: str) -> int:
        held = self._held[self._slot(worker)]
        return sum(len(held[plane]) for plane in _EVENTS)

    def __len__(self) -> int:
        return sum(self._entries[plane] for plane in _EVENTS)

    @property
    def assumed(self) -> int:
        return self._entries[ASSUMED]

    @property
    def nbytes(self) -> int:
        dicts = [*self._tables, self._used]
        sets = [held for planes in self._held for held in planes]
        blocks = max(len(self._used), *(len(table) for table in self._tables))
        return sum(map(sys.getsizeof, dicts)) + sum(map(sys.getsizeof, sets)) + blocks * sys.getsizeof(1 << 63)

    # Parts.

    def _slot(self, worker: str) -> int:
        slot = self._slots.get(worker)
        if slot is None:
            raise UnknownWorker(f"the index has no worker {worker!r}")
        return slot

    def _named(self, device: dict[int, int], host: dict[int, int], disk: dict[int, int]) -> dict[str, Overlap]:
        found = {}
        for slot, blocks in disk.items():
            name = self._names[slot]
            if blocks and name is not None:
                first, second = device.get(slot, 0), host.get(slot, 0)
                found[name] = Overlap(first, second - first, blocks - second)
        return found

    def _ends(self, chain: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Iterate over (block, workers that have the one before it and not it), in order, with as few comparisons as possible.

        The workers are a mask for each reach: device, with host, with disk, one above the other; the lowest alone if there are
        no such blocks.
        """
        ((low, left),) = self._holders(chain, [0])
        if not left:
            return
        last = len(chain) - 1
        count = min(ROUND, last)
        # blocks that were looked at and come next, the nearest at the end, each with its holders
        ahead = self._holders(chain, [step * last // count for step in range(count, 0, -1)])
        while ahead:
            at, holders = ahead.pop()
            gone = left & ~holders
            if gone:
                gap = at - low
                if gap > 1:
                    ahead.append((at, holders))
                    count = min(gap, ROUND + 1)
                    ahead += self._holders(chain, [low + step * gap // count for step in range(count - 1, 0, -1)])
                    continue
                yield at, gone
                left &= holders
                if not left:
                    return
            low = at
        yield len(chain), left

    def _holders(self, chain: Sequence[int], at: list[int]) -> list[tuple[int, int]]:
        device, host, disk, assumed = self._tables
        if not host and not disk:
            if not assumed:
                return [(i, device.get(chain[i], 0)) for i in at]
            return [(i, device.get(block := chain[i], 0) | assumed.get(block, 0)) for i in at]
        width, found = len(self._names), []
        for i in at:
            block = chain[i]
            first = device.get(block, 0) | assumed.get(block, 0)
            second = first | host.get(block, 0)
            found.append((i, first | second << width | (second | disk.get(block, 0)) << 2 * width))
        return found

    def _drop_outs(self, tables: Sequence[dict[int, int]], chain: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Iterate over (block, workers whose prefix ends before it), in order, for workers that hold the first one."""
        held_by: Iterator[int] = map(tables[0].get, chain, _ZEROS)
        for table in tables[1:]:
            if table:
                held_by = map(or_, held_by, map(table.get, chain, _ZEROS))
        left = last = next(held_by)
        if not left:
            return
        for at, workers in enumerate(held_by, 1):
            if workers != last:
                last = workers
                gone = left & ~workers
                if gone:
                    yield at, gone
                    left &= workers
                    if not left:
                        return
        yield len(chain), left

    def _touch(self, blocks: Sequence[int]) -> None:
        """Mark blocks as used. The last one becomes the first to go: without its head no tail is of use."""
        deque(map(self._used.pop, blocks, repeat(None)), maxlen=0)
        self._used.update(dict.fromkeys(reversed(blocks)))

    def _make_room(self) -> None:
        if sum(self._entries) <= self.max_entries:
            return
        target = self.max_entries - self.max_entries // _EVICT_SHARE
        gone: list[int] = []
        oldest = iter(self._used)
        while sum(self._entries) > target:
            block = next(oldest)
            gone.append(block)
            for plane, table in enumerate(self._tables):
                for slot in _bits(table.pop(block, 0)):
                    self._held[slot][plane].discard(block)
                    self._entries[plane] -= 1
        for block in gone:
            del self._used[block]
        self.evicted += len(gone)
        if self.on_evict is not None:
            self.on_evict(gone)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
