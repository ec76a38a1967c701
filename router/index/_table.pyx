# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The prefix index, compiled: it does the same as `headrace.router.index.prefix` in less time and memory.

A hash table from block to a set of workers (`_holders`), open addressing with linear probing and deletion by shifting back, so
that no tombstones remain.  It is split into shards by the upper bits of the hash: each grows by itself, and growing never stops
the caller for longer than one shard takes.  Beside it stands one array of blocks per worker, for operations on a
whole worker; it may name blocks that the worker has lost, and is cleaned when those become many.

An exact match reads the chain in steps that grow (8, 32, 128, 256 blocks) and prefetches the entries of a step before it looks
at the first, so that their cache misses overlap.  A galloping one does the same with the blocks of a round, of which none waits
for another: the memory is waited for once a round.

Eviction samples: of 64 entries, those that come next as a hand goes round the table, the 8 go that were stored or matched
longest ago.  Blocks at the end of a list count as a little older than those at its beginning.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from headrace.router.index._bits cimport hr_lowest
from headrace.router.index._chain cimport Chain
from headrace.router.index._holders cimport Holders
from headrace.router.index._slots cimport LEAST, SHARDS, Shard, Slot, erase, find, find_room, mixed_key, prefetch

from headrace.router.errors import UnknownWorker
from headrace.router.index.types import ROUND, plane_of
from headrace.router.index.types import Overlap

cdef enum:
    PLANES = 4
    GUESSED = 3
    STEP = 256        # blocks looked up at once
    MEMO = 16
    SAMPLE = 64
    VICTIMS = 8
    BATCH = 256       # entries evicted at a time
    AGES = 8          # steps of age inside one call
    INTERNED = 4096
    PROBES = 4        # `headrace.router.index.types.ROUND`

cdef struct Worker:
    uint64_t *keys      # blocks it was given, without order; some may be gone, and only then some twice
    size_t size
    size_t room
    size_t gone         # how many of `keys` it has lost since they were cleaned
    size_t counts[PLANES]
    uint64_t changes    # of what it has by events, and of the order of `keys`; what was evicted is no change

cdef struct Memo:       # what one call has learned: this set becomes that one
    uint32_t origin
    uint32_t result
    bint known
    bint before         # the worker was in it, in any plane
    bint after

cdef object _overlap_new = tuple.__new__
cdef object _Overlap = Overlap
cdef list _interned = [None] * INTERNED
if ROUND != PROBES:
    raise ImportError("the index was compiled with another headrace.router.index.types than the one here")


cdef object _overlap(uint32_t device, uint32_t host, uint32_t disk):
    """Make an overlap from the lengths that the tiers reach together."""
    cdef object found
    if device == disk and device < INTERNED:
        found = _interned[device]
        if found is None:
            found = _overlap_new(_Overlap, (device, 0, 0))
            _interned[device] = found
        return found
    return _overlap_new(_Overlap, (device, host - device, disk - host))


cdef class _Seen:
    """A set of the blocks seen so far."""
    cdef Shard shards[SHARDS]

    def __cinit__(self):
        cdef int i
        for i in range(SHARDS):
            self.shards[i].slots = <Slot *>calloc(LEAST, sizeof(Slot))
            self.shards[i].mask = LEAST - 1
            if self.shards[i].slots == NULL:
                raise MemoryError

    def __dealloc__(self):
        cdef int i
        for i in range(SHARDS):
            free(self.shards[i].slots)

    cdef bint add(self, uint64_t key) except -1:
        """Add a block. Return False if it was there."""
        cdef Slot *found = find(self.shards, key)
        if found.holders:
            return False
        find_room(self.shards, key).holders = 1
        return True


cdef class CompiledPrefixIndex:
    """Implements `headrace.router.index.types.BlockTable`."""
    cdef public object on_evict
    cdef public size_t max_entries
    cdef readonly size_t evicted
    cdef Shard shards[SHARDS]
    cdef Holders holders
    cdef Worker *workers_at
    cdef uint32_t n_workers, room_workers
    cdef dict slots
    cdef list names
    cdef size_t entries[PLANES]
    cdef uint32_t clock
    cdef uint32_t hand_shard, hand_slot
    cdef Memo memo[MEMO]
    cdef uint64_t *alive      # scratch of a match: first holders, then per tier who is still in
    cdef uint32_t *reach      # scratch of a match: per tier and worker

    implementation = "compiled"

    def __cinit__(self, *, size_t max_entries=0, on_evict=None):
        cdef int i
        self.max_entries = max_entries
        self.on_evict = on_evict
        self.holders = Holders()
        self.slots = {}
        self.names = []
        for i in range(SHARDS):
            self.shards[i].slots = <Slot *>calloc(LEAST, sizeof(Slot))
            self.shards[i].mask = LEAST - 1
            if self.shards[i].slots == NULL:
                raise MemoryError
        self._scratch()

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(<uint32_t>SHARDS):
            free(self.shards[i].slots)
        for i in range(self.room_workers):
            free(self.workers_at[i].keys)
        free(self.workers_at)
        free(self.alive)
        free(self.reach)

    # -- workers

    def add_worker(self, str worker not None):
        cdef uint32_t slot
        cdef Worker *grown
        if worker in self.slots:
            return
        slot = self.names.index(None) if None in self.names else len(self.names)
        if slot == self.room_workers:
            grown = <Worker *>realloc(self.workers_at, (slot * 2 + 16) * sizeof(Worker))
            if grown == NULL:
                raise MemoryError
            memset(grown + slot, 0, (slot + 16) * sizeof(Worker))
            self.workers_at = grown
            self.room_workers = slot * 2 + 16
        if slot >= 64 * self.holders.words:
            self.holders.widen(2 * self.holders.words)
            self._scratch()
        if slot == len(self.names):
            self.names.append(None)
            self.n_workers = slot + 1
        self.names[slot] = worker
        self.slots[worker] = slot

    def drop_worker(self, str worker not None):
        if worker in self.slots:
            self.clear(worker)
            self.names[self.slots.pop(worker)] = None

    def workers(self):
        return list(self.slots)

    # -- blocks

    def store(self, str worker not None, tier, blocks):
        self._add(self._slot(worker), plane_of(tier), Chain(blocks))

    def assume(self, str worker not None, blocks):
        self._add(self._slot(worker), GUESSED, Chain(blocks))

    def remove(self, str worker not None, tier, blocks):
        self._take(self._slot(worker), plane_of(tier), Chain(blocks))

    def unassume(self, str worker not None, blocks):
        self._take(self._slot(worker), GUESSED, Chain(blocks))

    def clear(self, str worker not None):
        cdef uint32_t slot = self._slot(worker)
        cdef Worker *record = &self.workers_at[slot]
        cdef Memo *memo
        cdef size_t start, i, n
        cdef int plane
        cdef uint64_t *keys
        cdef Slot *found
        cdef uint64_t changes = record.changes + 1
        self._forget()
        for start in range(0, record.size, STEP):
            n = min(<size_t>STEP, record.size - start)
            keys = record.keys + start
            prefetch(self.shards, keys, <int>n)
            for i in range(n):
                found = find(self.shards, keys[i])
                if found.holders:
                    memo = self._changed(found.holders, -1, slot, False)
                    if memo.before:
                        self._replace(found, memo.result)
        for plane in range(PLANES):
            self.entries[plane] -= record.counts[plane]
        free(record.keys)
        memset(record, 0, sizeof(Worker))
        record.changes = changes
        self.holders.sweep()

    cdef int _add(self, uint32_t slot, int plane, Chain chain) except -1:
        cdef uint64_t keys[STEP]
        cdef Worker *record = &self.workers_at[slot]
        cdef Py_ssize_t start, n = chain.n
        cdef int i, count
        cdef Memo *memo
        cdef Slot *found
        cdef uint32_t origin
        for start in range(0, n, STEP):
            count = <int>min(<Py_ssize_t>STEP, n - start)
            chain.read(start, count, keys)
            prefetch(self.shards, keys, count)
            self._forget()
            for i in range(count):
                found = find(self.shards, keys[i])
                origin = found.holders
                memo = self._changed(origin, plane, slot, True)
                if memo.result != origin:
                    if not memo.before:
                        self._note(record, slot, keys[i])
                    if origin == 0:
                        found = find_room(self.shards, keys[i])
                    self.holders.refs[memo.result] += 1
                    found.holders = memo.result
                    self.holders.release(origin)
                    record.counts[plane] += 1
                    record.changes += plane != GUESSED
                    self.entries[plane] += 1
                found.used = self.clock - <uint32_t>((start + i) * AGES // n)
            self.holders.sweep()
            if self.max_entries and self._held() > self.max_entries:
                self._make_room()
        self.clock += AGES
        return 0

    cdef int _take(self, uint32_t slot, int plane, Chain chain) except -1:
        cdef uint64_t keys[STEP]
        cdef Worker *record = &self.workers_at[slot]
        cdef Py_ssize_t start, n = chain.n
        cdef int i, count
        cdef Memo *memo
        cdef Slot *found
        if record.counts[plane] == 0:
            return 0
        for start in range(0, n, STEP):
            count = <int>min(<Py_ssize_t>STEP, n - start)
            chain.read(start, count, keys)
            prefetch(self.shards, keys, count)
            self._forget()
            for i in range(count):
                found = find(self.shards, keys[i])
                if found.holders == 0:
                    continue
                memo = self._changed(found.holders, plane, slot, False)
                if memo.result != found.holders:
                    record.counts[plane] -= 1
                    record.changes += plane != GUESSED
                    self.entries[plane] -= 1
                    if not memo.after:
                        record.gone += 1
                    self._replace(found, memo.result)
            self.holders.sweep()
        return 0

    # -- questions

    def match(self, blocks):
        cdef Chain chain = Chain(blocks)
        cdef uint32_t at[PROBES + 1]
        cdef uint32_t sets[PROBES + 1]
        cdef int i, count
        if chain.n == 0:
            return {}
        count = <int>min(<Py_ssize_t>PROBES, chain.n - 1)
        at[0] = 0
        for i in range(count):
            at[i + 1] = <uint32_t>((i + 1) * (chain.n - 1) // count)
        self._probe(chain, at, count + 1, sets)
        if not self._begin(sets[0]):
            return {}
        for i in range(count):
            if not self._narrow(chain, at[i], at[i + 1], sets[i + 1]):
                break
        return self._answer(<uint32_t>chain.n)

    def match_exact(self, blocks):
        cdef Chain chain = Chain(blocks)
        cdef uint64_t keys[STEP]
        cdef Py_ssize_t start = 0, n = chain.n
        cdef int i, count = 8
        cdef uint32_t which = 0, at
        cdef Slot *found
        cdef bint stamp = self.max_entries != 0, left = True
        while start < n and left:
            if count > n - start:
                count = <int>(n - start)
            chain.read(start, count, keys)
            prefetch(self.shards, keys, count)
            for i in range(count):
                found = find(self.shards, keys[i])
                at = <uint32_t>(start + i)
                if at == 0:
                    which = found.holders
                    if not self._begin(which):
                        return {}
                elif found.holders != which:
                    which = found.holders
                    left = self._drop(which, at)
                    if not left:
                        break
                if stamp:
                    found.used = self.clock - <uint32_t>(at * AGES // n)
            start += count
            count = min(<int>STEP, count * 4)
        self.clock += AGES
        return self._answer(<uint32_t>n) if n else {}

    def match_worker(self, str worker not None, blocks):
        cdef uint32_t slot = self._slot(worker)
        cdef Chain chain = Chain(blocks)
        cdef Holders holders = self.holders
        cdef uint64_t keys[STEP]
        cdef Py_ssize_t start = 0
        cdef int i, count = 8
        cdef uint32_t which = 0, device = 0, host = 0, total = 0
        cdef bint on_device = False, on_host = False, stamp = self.max_entries != 0
        cdef Slot *found
        while start < chain.n:
            if count > chain.n - start:
                count = <int>(chain.n - start)
            chain.read(start, count, keys)
            prefetch(self.shards, keys, count)
            for i in range(count):
                found = find(self.shards, keys[i])
                which = found.holders
                if not holders.has_any(which, slot):
                    return _overlap(device, host, total)
                on_device = holders.has(which, 0, slot) or holders.has(which, GUESSED, slot)
                on_host = on_device or holders.has(which, 1, slot)
                device += on_device and device == total
                host += on_host and host == total
                if stamp:
                    found.used = self.clock - <uint32_t>(total * AGES // chain.n)
                total += 1
            start += count
            count = min(<int>STEP, count * 4)
        self.clock += AGES
        return _overlap(device, host, total)

    def blocks(self, str worker not None, tier):
        cdef uint32_t slot = self._slot(worker)
        cdef int plane = plane_of(tier)
        cdef Worker *record = &self.workers_at[slot]
        cdef size_t i, n = record.counts[plane], at = 0
        cdef bytes result = PyBytes_FromStringAndSize(NULL, n * 8)
        cdef unsigned char *out = <unsigned char *>PyBytes_AS_STRING(result)
        cdef uint64_t key
        cdef int byte
        if record.gone:
            self._clean(record, slot)
        for i in range(record.size):
            if n != record.size and i % STEP == 0:
                prefetch(self.shards, record.keys + i, <int>min(<size_t>STEP, record.size - i))
            key = record.keys[i]
            if n == record.size or self.holders.has(find(self.shards, key).holders, plane, slot):
                for byte in range(8):
                    out[at + byte] = (key >> (8 * byte)) & 0xFF
                at += 8
        assert at == n * 8
        return result

    def iter_blocks(self, str worker not None, tier, Py_ssize_t size):
        cdef uint32_t slot = self._slot(worker)
        cdef int plane = plane_of(tier)
        cdef Worker *record = &self.workers_at[slot]
        cdef uint64_t changes = record.changes
        cdef size_t start = 0, end = record.size  # beyond that is what was assumed since
        cdef _Seen seen = _Seen() if record.gone else None
        if size < 1:
            raise ValueError(f"parts of {size} blocks")
        while start < end:
            if self.workers_at[slot].changes != changes:  # not `record`: where the workers are may change
                raise RuntimeError(f"the blocks of worker {worker!r} changed while they were read")
            yield self._part(slot, plane, start, min(<size_t>size, end - start), seen)
            start += size

    def count(self, str worker not None):
        cdef Worker *record = &self.workers_at[self._slot(worker)]
        return record.counts[0] + record.counts[1] + record.counts[2]

    def __len__(self):
        return self.entries[0] + self.entries[1] + self.entries[2]

    @property
    def assumed(self):
        return self.entries[GUESSED]

    @property
    def nbytes(self):
        cdef size_t total = self.holders.nbytes() + self.room_workers * sizeof(Worker)
        cdef uint32_t i
        for i in range(<uint32_t>SHARDS):
            total += (<size_t>self.shards[i].mask + 1) * sizeof(Slot)
        for i in range(self.room_workers):
            total += self.workers_at[i].room * sizeof(uint64_t)
        return total

    # -- parts

    cdef int _begin(self, uint32_t which) noexcept:
        """Begin a match with the holders of its first block. Return 0 if there are none."""
        cdef Holders holders = self.holders
        cdef uint32_t words = holders.words, x
        cdef int tier
        cdef uint64_t *bits = holders.bits + <size_t>which * holders.row
        cdef uint64_t held
        if which == 0:
            return 0
        for x in range(words):
            held = bits[x] | bits[words + x] | bits[2 * words + x] | bits[3 * words + x]
            for tier in range(4):
                self.alive[tier * words + x] = held
        self._drop(which, 0)
        return 1

    cdef bint _drops(self, uint32_t which) noexcept:
        """Return whether a worker is still in that is not in this set."""
        cdef Holders holders = self.holders
        cdef uint32_t words = holders.words, x
        cdef uint64_t *bits = holders.bits + <size_t>which * holders.row
        cdef uint64_t *alive = self.alive
        cdef uint64_t held
        for x in range(words):
            held = bits[x] | bits[GUESSED * words + x]
            if alive[x] & ~held:
                return True
            held |= bits[words + x]
            if alive[words + x] & ~held:
                return True
            if alive[2 * words + x] & ~(held | bits[2 * words + x]):
                return True
        return False

    cdef bint _drop(self, uint32_t which, uint32_t at) noexcept:
        """Note how far workers got that do not hold block `at`. Return False if no worker is left."""
        cdef Holders holders = self.holders
        cdef uint32_t words = holders.words, x
        cdef uint32_t *reach
        cdef uint64_t *bits = holders.bits + <size_t>which * holders.row
        cdef uint64_t *alive = self.alive
        cdef uint64_t held, gone, left = 0
        cdef int tier
        for x in range(words):
            held = bits[x] | bits[GUESSED * words + x]
            for tier in range(3):
                if tier:
                    held |= bits[tier * words + x]
                gone = alive[tier * words + x] & ~held
                alive[tier * words + x] ^= gone
                reach = self.reach + 64 * (tier * words + x)
                while gone:
                    reach[hr_lowest(gone)] = at
                    gone &= gone - 1
            left |= alive[2 * words + x]
        return left != 0

    cdef int _probe(self, Chain chain, uint32_t *at, int count, uint32_t *sets) except -1:
        """Look up the holders of some blocks."""
        cdef uint64_t keys[PROBES + 1]
        cdef int i
        chain.pick(at, count, keys)
        prefetch(self.shards, keys, count)
        for i in range(count):
            sets[i] = find(self.shards, keys[i]).holders
        return 0

    cdef int _narrow(self, Chain chain, uint32_t low, uint32_t high, uint32_t which) except -1:
        """Find the workers that drop out after block `low`, up to `high`, whose holders are `which`. Return 0 if none is left.

        All workers that are still in have block `low`.
        """
        cdef uint32_t at[PROBES]
        cdef uint32_t sets[PROBES]
        cdef uint64_t gap = high - low
        cdef int i, count
        if not self._drops(which):
            return 1
        if gap == 1:
            return self._drop(which, high)
        count = <int>min(<uint64_t>PROBES, gap - 1)
        for i in range(count):
            at[i] = low + <uint32_t>((i + 1) * gap // (count + 1))
        self._probe(chain, at, count, sets)
        for i in range(count):
            if not self._narrow(chain, low, at[i], sets[i]):
                return 0
            low = at[i]
        return self._narrow(chain, low, high, which)

    cdef dict _answer(self, uint32_t n):
        """Return how far each worker got that had the first block; those that are still in got to the end."""
        cdef uint32_t words = self.holders.words, x, slot
        cdef uint32_t stride = 64 * words
        cdef uint32_t *reach = self.reach
        cdef uint64_t left
        cdef dict result = {}
        cdef int tier
        for tier in range(3):
            for x in range(words):
                left = self.alive[tier * words + x]
                while left:
                    reach[tier * stride + 64 * x + hr_lowest(left)] = n
                    left &= left - 1
        for x in range(words):
            left = self.alive[3 * words + x]
            while left:
                slot = 64 * x + hr_lowest(left)
                left &= left - 1
                result[self.names[slot]] = _overlap(reach[slot], reach[stride + slot], reach[2 * stride + slot])
        return result

    cdef bytes _part(self, uint32_t slot, int plane, size_t start, size_t n, _Seen seen):
        """Return those of a worker's keys from `start` on that it has in this tier and that were not seen."""
        cdef uint64_t *keys = self.workers_at[slot].keys
        cdef bytearray result = bytearray(n * 8)
        cdef unsigned char *out = <unsigned char *>PyByteArray_AS_STRING(result)
        cdef size_t i, at = 0
        cdef int byte
        for i in range(start, start + n):
            if (i - start) % STEP == 0:
                prefetch(self.shards, keys + i, <int>min(<size_t>STEP, start + n - i))
            if self.holders.has(find(self.shards, keys[i]).holders, plane, slot) and (seen is None or seen.add(keys[i])):
                for byte in range(8):
                    out[at + byte] = (keys[i] >> (8 * byte)) & 0xFF
                at += 8
        return PyBytes_FromStringAndSize(<char *>out, at)

    cdef uint32_t _slot(self, str worker) except? 0xFFFFFFFF:
        slot = self.slots.get(worker)
        if slot is None:
            raise UnknownWorker(f"the index has no worker {worker!r}")
        return slot

    cdef size_t _held(self) noexcept:
        return self.entries[0] + self.entries[1] + self.entries[2] + self.entries[3]

    cdef int _scratch(self) except -1:
        cdef size_t words = self.holders.words
        free(self.alive)
        free(self.reach)
        self.alive = <uint64_t *>calloc(4 * words, sizeof(uint64_t))
        self.reach = <uint32_t *>calloc(3 * 64 * words, sizeof(uint32_t))
        if not (self.alive and self.reach):
            raise MemoryError
        return 0

    cdef void _forget(self) noexcept:
        memset(self.memo, 0, sizeof(self.memo))

    cdef inline Memo *_changed(self, uint32_t origin, int plane, uint32_t slot, bint held) except NULL:
        cdef Memo *memo = &self.memo[origin & (MEMO - 1)]
        if not memo.known or memo.origin != origin:
            memo.result = self.holders.changed(origin, plane, slot, held)
            memo.origin = origin
            memo.before = self.holders.has_any(origin, slot)
            memo.after = self.holders.has_any(memo.result, slot)
            memo.known = True
        return memo

    cdef int _replace(self, Slot *found, uint32_t holders) except -1:
        """Give an entry other holders; without any it goes."""
        cdef uint32_t origin = found.holders
        if holders:
            self.holders.refs[holders] += 1
            found.holders = holders
        else:
            erase(self.shards, found)
        self.holders.release(origin)
        return 0

    cdef int _note(self, Worker *record, uint32_t slot, uint64_t key) except -1:
        cdef size_t room
        cdef uint64_t *grown
        if record.size == record.room and record.gone > record.size // 2:
            self._clean(record, slot)
        if record.size == record.room:
            room = record.room + record.room // 4 + 16
            grown = <uint64_t *>realloc(record.keys, room * sizeof(uint64_t))
            if grown == NULL:
                raise MemoryError
            record.keys = grown
            record.room = room
        record.keys[record.size] = key
        record.size += 1
        return 0

    cdef int _clean(self, Worker *record, uint32_t slot) except -1:
        """Clean a worker's keys: each block that it has stays once. Entries seen are marked by the top bit of their set."""
        cdef size_t start, i, n, kept = 0
        cdef Slot *found
        cdef uint64_t key
        cdef uint32_t mark = 0x80000000
        for start in range(0, record.size, STEP):
            n = min(<size_t>STEP, record.size - start)
            prefetch(self.shards, record.keys + start, <int>n)
            for i in range(start, start + n):
                key = record.keys[i]
                found = find(self.shards, key)
                if found.holders & mark == 0 and self.holders.has_any(found.holders, slot):
                    found.holders |= mark
                    record.keys[kept] = key
                    kept += 1
        for start in range(0, kept, STEP):
            n = min(<size_t>STEP, kept - start)
            prefetch(self.shards, record.keys + start, <int>n)
            for i in range(start, start + n):
                find(self.shards, record.keys[i]).holders &= ~mark
        record.size = kept
        record.gone = 0
        record.changes += 1
        return 0

    cdef int _make_room(self) except -1:
        cdef list gone = None if self.on_evict is None else []
        cdef size_t target = self.max_entries - min(self.max_entries // 32, <size_t>BATCH)
        while self._held() > target:
            self._evict_some(target, gone)
        self.holders.sweep()
        if gone is not None:
            self.on_evict(gone)
        return 0

    cdef int _evict_some(self, size_t target, list gone) except -1:
        cdef uint64_t keys[SAMPLE]
        cdef uint32_t ages[SAMPLE]
        cdef int n = 0, i, oldest, round, shards = 0
        cdef Shard *shard
        cdef Slot *found
        while n < SAMPLE and shards <= SHARDS:
            shard = &self.shards[self.hand_shard]
            while n < SAMPLE and self.hand_slot <= shard.mask:
                found = &shard.slots[self.hand_slot]
                self.hand_slot += 1
                if found.holders:
                    keys[n] = found.key
                    ages[n] = self.clock - found.used
                    n += 1
            if self.hand_slot > shard.mask:
                self.hand_slot = 0
                self.hand_shard = (self.hand_shard + 1) % SHARDS
                shards += 1
        for round in range(max(1, min(n // 4, <int>VICTIMS))):
            if n == 0 or self._held() <= target:
                break
            oldest = 0
            for i in range(1, n):
                if ages[i] > ages[oldest]:
                    oldest = i
            if self._evict(keys[oldest]) and gone is not None:
                gone.append(keys[oldest])
            n -= 1
            keys[oldest] = keys[n]
            ages[oldest] = ages[n]
        return 0

    cdef int _evict(self, uint64_t key) except -1:
        """Evict an entry. Return whether it was there."""
        cdef Slot *found = find(self.shards, key)
        cdef Holders holders = self.holders
        cdef uint32_t slot, which = found.holders
        cdef int plane
        if which == 0:  # the hand came round and met it twice in one sample
            return 0
        for slot in range(self.n_workers):
            if holders.has_any(which, slot):
                for plane in range(PLANES):
                    if holders.has(which, plane, slot):
                        self.workers_at[slot].counts[plane] -= 1
                        self.entries[plane] -= 1
                self.workers_at[slot].gone += 1
        self._replace(found, 0)
        self.evicted += 1
        return 1
