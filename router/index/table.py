# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: annotation_typing=False, infer_types=True
"""The prefix index: which workers hold a block, and how far into a chain each of them goes.

A table maps each block to a *set* of workers.  Each set is kept once: blocks of one prompt have the same holders and most
blocks have one, so sets are few, an entry is small for any number of workers, and work is done where the set changes from one
block to the next.  Beside the table stands a list of blocks per worker, for operations on a whole worker; it may name blocks
that the worker has lost, and is cleaned when those become many.

An exact match reads the chain in steps that grow.  A galloping one looks at a few blocks all over the chain, then between two
of them at a few more if a worker dropped out there, until it has both sides of every end.

This source runs as it is, and is compiled as `_table` where there is a compiler; `_table.pxd` has the types for that.  Only the
memory differs: `blocks.py` or `_blocks.pyx`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.router.errors import UnknownWorker
from headrace.router.index.blocks import Blocks, Words
from headrace.router.index.types import ASSUMED, NO_OVERLAP, PLANES, ROUND, OnEvict, Overlap, Tier, plane_of

ALL = -1  # planes
_SWEEP = 64  # sets that may have no blocks before they are looked at
_EVICT_SHARE = 32  # of a full index one part in so many is evicted at once
_overlap_new = tuple.__new__
_ALIKE = [Overlap(device) for device in range(1_024)]


class WorkerSets:
    """Sets of workers, each a row of bits per plane (tier or assumption). Set 0 is the empty one and is never freed."""

    def __init__(self, words: type[Words]) -> None:
        self.words = 1  # 64 workers each
        self.row = PLANES  # words of a set
        self.bits = words(64 * PLANES)
        self.refs = words(64)  # blocks that have this set
        self._changed = words(PLANES)
        self._numbers: dict[bytes, int] = {self.bits.packed(0, PLANES): 0}
        self._free = list(range(63, 0, -1))
        self.dead: list[int] = []  # that may have no blocks, for `sweep`

    def has(self, which: int, plane: int, slot: int) -> bool:
        return (self.bits.at[which * self.row + plane * self.words + (slot >> 6)] >> (slot & 63)) & 1 != 0

    def has_any(self, which: int, slot: int) -> bool:
        bits, at, words = self.bits.at, which * self.row + (slot >> 6), self.words
        return ((bits[at] | bits[at + words] | bits[at + 2 * words] | bits[at + 3 * words]) >> (slot & 63)) & 1 != 0

    def tier(self, which: int, slot: int) -> int:
        """Return the highest tier in which the worker has blocks with this set, assumed ones included; 3 if none."""
        bits, at, words, shift = self.bits.at, which * self.row + (slot >> 6), self.words, slot & 63
        if ((bits[at] | bits[at + ASSUMED * words]) >> shift) & 1:
            return 0
        for tier in range(1, 3):
            if (bits[at + tier * words] >> shift) & 1:
                return tier
        return 3

    def changed(self, origin: int, plane: int, slot: int, held: bool) -> int:
        """Return the set that differs from `origin` in this worker only. It may have no block yet: `move` says how many."""
        bits, row, words, base = self._changed.at, self.bits.at, self.words, origin * self.row
        for x in range(self.row):
            bits[x] = row[base + x]
        bit = 1
        bit <<= slot & 63
        for each in range(PLANES):
            if plane in (ALL, each):
                x = each * words + (slot >> 6)
                bits[x] = bits[x] | bit if held else bits[x] & ~bit
        key = self._changed.packed(0, self.row)
        found = self._numbers.get(key)
        if found is not None:
            return found
        if not self._free:
            self._grow()
        which = self._free.pop()
        row, base = self.bits.at, which * self.row
        for x in range(self.row):
            row[base + x] = bits[x]
        self._numbers[key] = which
        return which

    def move(self, origin: int, result: int, count: int) -> None:
        """Note that so many blocks have another set. One without blocks may come back until `sweep`."""
        refs = self.refs.at
        if result:
            refs[result] += count
            if count == 0:
                self.dead.append(result)
        if origin:
            refs[origin] -= count
            if refs[origin] == 0:
                self.dead.append(origin)

    def sweep(self) -> None:
        """Free the sets that no block has."""
        for which in self.dead:
            if self.refs.at[which] == 0:
                key = self.bits.packed(which * self.row, self.row)
                if self._numbers.get(key) == which:  # else freed already
                    del self._numbers[key]
                    self._free.append(which)
        self.dead.clear()

    def widen(self, words: int) -> None:
        """Make room for 64 × `words` workers."""
        old, before, row, numbers = self.bits, self.words, self.row, self._numbers
        self.words, self.row = words, PLANES * words
        self.bits = type(old)(len(self.refs) * self.row)
        self._changed.resize(self.row)
        self._numbers = {}
        for which in numbers.values():
            for plane in range(PLANES):
                for x in range(before):
                    self.bits.at[which * self.row + plane * words + x] = old.at[which * row + plane * before + x]
            self._numbers[self.bits.packed(which * self.row, self.row)] = which

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + self.refs.nbytes + len(self._numbers) * (8 * self.row + 150)

    def _grow(self) -> None:
        before = len(self.refs)
        after = before + before // 2
        self.bits.resize(after * self.row)
        self.refs.resize(after)
        self._free.extend(range(after - 1, before - 1, -1))


class Slots(dict[str, int]):
    """The number of each worker."""

    def __missing__(self, worker: str) -> int:
        raise UnknownWorker(f"the index has no worker {worker!r}")


class Record:
    """A worker's blocks. Some of `keys` may be gone, and only then some be there twice."""

    def __init__(self, keys: Words) -> None:
        self.keys = keys
        self.gone = 0  # how many of `keys` it has lost since they were cleaned
        self.counts = [0] * PLANES
        self.changes = 0  # of what it has by events, and of the order of `keys`; what was evicted is no change


class PrefixTable:
    """Implements `headrace.router.index.types.BlockTable` over `Blocks` and `Words`, of either form."""

    def __init__(
        self, blocks: type[Blocks], words: type[Words], *, max_entries: int = 0, on_evict: OnEvict | None = None
    ) -> None:
        self.implementation = blocks.implementation
        self.max_entries = max_entries
        self.on_evict = on_evict
        self.evicted = 0
        self._new_blocks = blocks
        self._new_words = words
        self._blocks = blocks()
        self._sets = WorkerSets(words)
        self._slots = Slots()
        self._names: list[str] = []  # empty: a free slot
        self._records: list[Record] = []
        self._entries = [0] * PLANES
        self._alive = words(3)
        self._reach = words(2 * 64)

    # Workers.

    def add_worker(self, worker: str) -> None:
        if worker in self._slots:
            return
        slot = self._names.index("") if "" in self._names else len(self._names)
        if slot >= 64 * self._sets.words:
            self._sets.widen(2 * self._sets.words)
            self._alive.resize(3 * self._sets.words)
            self._reach.resize(2 * 64 * self._sets.words)
        if slot == len(self._names):
            self._names.append("")
            self._records.append(Record(self._new_words(0)))
        self._names[slot] = worker
        self._slots[worker] = slot

    def drop_worker(self, worker: str) -> None:
        if worker in self._slots:
            self.clear(worker)
            self._names[self._slots.pop(worker)] = ""

    def workers(self) -> list[str]:
        return list(self._slots)

    # Blocks.

    def store(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        self._add(self._slots[worker], plane_of(tier), blocks)

    def assume(self, worker: str, blocks: Sequence[int]) -> None:
        self._add(self._slots[worker], ASSUMED, blocks)

    def remove(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        self._remove(self._slots[worker], plane_of(tier), blocks)

    def unassume(self, worker: str, blocks: Sequence[int]) -> None:
        self._remove(self._slots[worker], ASSUMED, blocks)

    def clear(self, worker: str) -> None:
        slot = self._slots[worker]
        record, step = self._records[slot], self._blocks.step
        size, start = len(record.keys), 0
        while start < size:
            self._take(slot, ALL, self._blocks.read_words(record.keys, start, min(step, size - start)))
            start += step
        self._sets.sweep()
        for plane in range(PLANES):
            self._entries[plane] -= record.counts[plane]
        empty = Record(self._new_words(0))
        empty.changes = record.changes + 1
        self._records[slot] = empty

    def _add(self, slot: int, plane: int, blocks: Sequence[int]) -> None:
        table, sets, record = self._blocks, self._sets, self._records[slot]
        chain = table.chain(blocks)
        length, start = len(chain), 0
        if record.gone > 64 and record.gone > len(record.keys) // 2:
            self._clean(slot)
        while start < length:
            step = min(table.step, length - start)
            count = table.read(chain, start, step)
            begin = added = 0
            while begin < count:
                origin, end = table.sets[begin], table.run(begin, count) if begin + 1 < count else count
                result = sets.changed(origin, plane, slot, True)
                if result != origin:
                    moved = table.put(begin, end, origin, result)
                    if origin == 0 or not sets.has_any(origin, slot):
                        table.append(record.keys, begin, moved)
                    sets.move(origin, result, moved)
                    added += moved
                begin = end
            if len(sets.dead) > _SWEEP:
                sets.sweep()
            if added:
                record.counts[plane] += added
                self._entries[plane] += added
                record.changes += plane != ASSUMED
            if self.max_entries:
                table.touch(chain, start, step, length)
                if self._held() > self.max_entries:
                    self._make_room()
            start += step

    def _remove(self, slot: int, plane: int, blocks: Sequence[int]) -> None:
        table, record = self._blocks, self._records[slot]
        if record.counts[plane] == 0:
            return
        chain = table.chain(blocks)
        length, start = len(chain), 0
        while start < length:
            gone = self._take(slot, plane, table.read(chain, start, min(table.step, length - start)))
            if len(self._sets.dead) > _SWEEP:
                self._sets.sweep()
            if gone:
                record.counts[plane] -= gone
                self._entries[plane] -= gone
                record.changes += plane != ASSUMED
            start += table.step

    def _take(self, slot: int, plane: int, count: int) -> int:
        """Take a worker out of the sets of the blocks that were read. Return how many had it."""
        table, sets, record = self._blocks, self._sets, self._records[slot]
        begin = taken = 0
        while begin < count:
            origin, end = table.sets[begin], table.run(begin, count) if begin + 1 < count else count
            if origin:
                result = sets.changed(origin, plane, slot, False)
                if result != origin:
                    moved = table.put(begin, end, origin, result)
                    sets.move(origin, result, moved)
                    taken += moved
                    if result == 0 or not sets.has_any(result, slot):
                        record.gone += moved
            begin = end
        return taken

    # Questions.

    def match(self, chain: Sequence[int]) -> dict[str, Overlap]:
        table = self._blocks
        read = table.chain(chain)
        last = len(read) - 1
        if last < 0:
            return {}
        parts = min(ROUND, max(last, 1))
        step = last // parts
        table.fetch(read, 0, last, 1)
        table.fetch(read, 0, step, parts - 1)
        which = table.at(read, 0)
        if which == 0:
            return {}
        found: dict[str, Overlap] = {}
        self._begin(which, found)
        low = 0
        for i in range(1, parts + 1):
            at = i * step if i < parts else last
            if not self._narrow(read, low, at, table.at(read, at)):
                return found
            low = at
        self._drop(0, last + 1)
        return found

    def match_exact(self, chain: Sequence[int]) -> dict[str, Overlap]:
        table = self._blocks
        read = table.chain(chain)
        length = len(read)
        if length == 0:
            return {}
        which = table.at(read, 0)
        if which == 0:
            return {}
        found: dict[str, Overlap] = {}
        self._begin(which, found)
        start, left = 0, True
        while left and start < length:
            begin, count = 0, table.look(read, start, min(32 + start // 2, table.step, length - start))
            while begin < count:
                if table.sets[begin] != which:
                    which = table.sets[begin]
                    left = self._drop(which, start + begin)
                    if not left:
                        break
                begin = table.run(begin, count)
            start += begin
        if left:
            self._drop(0, length)
        if self.max_entries:
            table.touch(read, 0, start, start)
        return found

    def match_worker(self, worker: str, chain: Sequence[int]) -> Overlap:
        slot = self._slots[worker]
        record = self._records[slot]
        if not (record.counts[0] or record.counts[1] or record.counts[2] or record.counts[3]):
            return NO_OVERLAP
        table, sets = self._blocks, self._sets
        read = table.chain(chain)
        length, start, left = len(read), 0, True
        device = host = 0
        while left and start < length:
            begin, count = 0, table.look(read, start, min(32 + start // 2, table.step, length - start))
            while begin < count:
                which, end = table.sets[begin], table.run(begin, count)
                tier = sets.tier(which, slot)
                if tier == ASSUMED:
                    left = False
                    break
                if tier == 0 and device == start + begin:
                    device = start + end
                if tier <= 1 and host == start + begin:
                    host = start + end
                begin = end
            start += begin
        if self.max_entries:
            table.touch(read, 0, start, start)
        return Overlap(device, host - device, start - host)

    def blocks(self, worker: str, tier: Tier) -> bytes:
        slot, plane = self._slots[worker], plane_of(tier)
        if self._records[slot].gone:
            self._clean(slot)
        found = self._part(slot, plane, 0, len(self._records[slot].keys))
        return found.packed(0, len(found))

    def iter_blocks(self, worker: str, tier: Tier, size: int) -> Iterator[bytes]:
        slot, plane = self._slots[worker], plane_of(tier)
        if size < 1:
            raise ValueError(f"parts of {size} blocks")
        changes, end = self._records[slot].changes, len(self._records[slot].keys)  # beyond is what was assumed since
        seen = self._new_blocks() if self._records[slot].gone else None
        for start in range(0, end, size):
            if self._records[slot].changes != changes:
                raise RuntimeError(f"the blocks of worker {worker!r} changed while they were read")
            found = self._part(slot, plane, start, min(size, end - start))
            if seen is not None:
                found = self._unseen(found, seen)
            yield found.packed(0, len(found))

    def count(self, worker: str) -> int:
        counts = self._records[self._slots[worker]].counts
        return counts[0] + counts[1] + counts[2]

    def __len__(self) -> int:
        return self._entries[0] + self._entries[1] + self._entries[2]

    @property
    def assumed(self) -> int:
        return self._entries[ASSUMED]

    @property
    def nbytes(self) -> int:
        return self._blocks.nbytes + self._sets.nbytes + sum([record.keys.nbytes for record in self._records])

    # Parts of a match: for each tier the workers that are still in, and how far those got that dropped out.

    def _begin(self, which: int, found: dict[str, Overlap]) -> None:
        """Begin with the holders of the first block. Without blocks in lower tiers all tiers reach as far as the first."""
        bits, alive, words, base = self._sets.bits.at, self._alive.at, self._sets.words, which * self._sets.row
        self._tiers = 3 if self._entries[1] or self._entries[2] else 1
        self._found, self._same = found, which
        for x in range(words):
            held = bits[base + x] | bits[base + words + x] | bits[base + 2 * words + x] | bits[base + ASSUMED * words + x]
            for tier in range(self._tiers):
                alive[tier * words + x] = held
        if self._tiers > 1:
            self._drop(which, 0)

    def _drops(self, which: int) -> bool:
        """Return whether a worker is still in that is not in this set."""
        bits, alive, words, base = self._sets.bits.at, self._alive.at, self._sets.words, which * self._sets.row
        for x in range(words):
            held = bits[base + x] | bits[base + ASSUMED * words + x]
            if alive[x] & ~held:
                return True
            for tier in range(1, self._tiers):
                held |= bits[base + tier * words + x]
                if alive[tier * words + x] & ~held:
                    return True
        return False

    def _drop(self, which: int, at: int) -> bool:
        """Note how far workers got that do not hold block `at`. Return False if no worker is left."""
        bits, alive, words, base = self._sets.bits.at, self._alive.at, self._sets.words, which * self._sets.row
        reach, found, names, last = self._reach.at, self._found, self._names, self._tiers - 1
        whole, left = _ALIKE[at] if at < 1_024 else Overlap(at), False
        for x in range(words):
            held = bits[base + x] | bits[base + ASSUMED * words + x]
            for tier in range(last + 1):
                if tier:
                    held |= bits[base + tier * words + x]
                gone = alive[tier * words + x] & ~held
                if gone:
                    alive[tier * words + x] ^= gone
                while gone:
                    slot = 64 * x + self._blocks.lowest(gone)
                    gone &= gone - 1
                    if last == 0:
                        found[names[slot]] = whole
                    elif tier < 2:
                        reach[64 * tier * words + slot] = at
                    else:
                        device, host = reach[slot], reach[64 * words + slot]
                        found[names[slot]] = _overlap_new(Overlap, (device, host - device, at - host))
            if alive[last * words + x]:
                left = True
        self._same = which
        return left

    def _narrow(self, chain: Any, low: int, high: int, which: int) -> bool:
        """Find the workers that drop out after block `low`, up to `high`, whose holders are `which`. False if none is left.

        All workers that are still in have block `low`.
        """
        if which == self._same or not self._drops(which):
            self._same = which
            return True
        gap = high - low
        if gap == 1:
            return self._drop(which, high)
        parts = min(ROUND + 1, gap)
        step = gap // parts
        self._blocks.fetch(chain, low, step, parts - 1)
        for _ in range(1, parts):
            at = low + step
            if not self._narrow(chain, low, at, self._blocks.at(chain, at)):
                return False
            low = at
        return self._narrow(chain, low, high, which)

    # Other parts.

    def _held(self) -> int:
        return self._entries[0] + self._entries[1] + self._entries[2] + self._entries[3]

    def _part(self, slot: int, plane: int, start: int, count: int) -> Words:
        """Return those of some of a worker's keys that it has in this plane. Some may be there twice."""
        table, sets, keys, found, end = self._blocks, self._sets, self._records[slot].keys, self._new_words(0), start + count
        while start < end:
            some = table.read_words(keys, start, min(table.step, end - start))
            begin = 0
            while begin < some:
                stop, which = table.run(begin, some), table.sets[begin]
                if sets.has_any(which, slot) if plane == ALL else sets.has(which, plane, slot):
                    table.append(found, begin, stop - begin)
                begin = stop
            start += table.step
        return found

    def _unseen(self, keys: Words, seen: Blocks) -> Words:
        """Return those of `keys` that were not seen, and note them."""
        start, end, found = 0, len(keys), self._new_words(0)
        while start < end:
            some = seen.read_words(keys, start, min(seen.step, end - start))
            begin = 0
            while begin < some:
                stop = seen.run(begin, some)
                if seen.sets[begin] == 0:
                    seen.append(found, begin, seen.put(begin, stop, 0, 1))
                begin = stop
            start += seen.step
        return found

    def _clean(self, slot: int) -> None:
        """Clean a worker's keys: each block that it has stays once."""
        record = self._records[slot]
        record.keys = self._unseen(self._part(slot, ALL, 0, len(record.keys)), self._new_blocks())
        record.gone = 0
        record.changes += 1

    def _make_room(self) -> None:
        gone: list[int] = []
        target = self.max_entries - min(self.max_entries // _EVICT_SHARE, self._blocks.batch)
        while self._held() > target:
            oldest = self._blocks.oldest(self._held() - target)
            gone += [block for block in oldest if self._held() > target and self._evict(block)]
        self._sets.sweep()
        self.evicted += len(gone)
        if self.on_evict is not None:
            self.on_evict(gone)

    def _evict(self, block: int) -> bool:
        table, sets = self._blocks, self._sets
        which = table.get(block, 0)
        if which == 0:  # it was met twice in one sample
            return False
        bits, words, base = sets.bits.at, sets.words, which * sets.row
        for x in range(words):
            anywhere = 0
            for plane in range(PLANES):
                held = bits[base + plane * words + x]
                anywhere |= held
                while held:
                    record = self._records[64 * x + table.lowest(held)]
                    held &= held - 1
                    record.counts[plane] -= 1
                    self._entries[plane] -= 1
            while anywhere:
                record = self._records[64 * x + table.lowest(anywhere)]
                anywhere &= anywhere - 1
                record.gone += 1
        table.erase(block)
        sets.move(which, 0, 1)
        return True
