# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`headrace.router.index.blocks` in C: entries of 16 bytes, and chains that are read without making objects.

Open addressing with linear probing and deletion by shifting back, so that no tombstones remain.  The table is split into
shards by the upper bits of the hash: each grows by itself, and growing never stops the caller for longer than one shard takes.
A chain is read in steps, and the entries of a step are prefetched before the first is looked at, so that their cache misses overlap.

Eviction samples: of 64 entries, those that come next as a hand goes round the table, the 8 go that were touched longest ago.
Blocks at the end of a chain count as a little older than those at its beginning.
"""

import sys
from array import array

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

cdef enum:
    LEAST = 8           # slots of a shard
    SAMPLE = 64
    VICTIMS = 8
    AGES = 8            # steps of age inside one call

cdef bint LITTLE = sys.byteorder == "little"

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define hr_prefetch(p) __builtin_prefetch(p, 1)
    #define hr_lowest(v) ((unsigned)__builtin_ctzll(v))
    #elif defined(_MSC_VER)
    #include <intrin.h>
    #define hr_prefetch(p) ((void)0)
    static unsigned hr_lowest(unsigned long long v) { unsigned long i; _BitScanForward64(&i, v); return i; }
    #endif

    /* The digits of an int, read in place where their layout is known: calling the interpreter for each takes as long as the
       rest of a lookup. Anything out of the ordinary goes to the interpreter, which also makes the errors. */
    #if PYLONG_BITS_IN_DIGIT == 30 && PY_VERSION_HEX < 0x030C0000
    #define HR_DIGITS(o) (((PyLongObject *)(o))->ob_digit)
    #define HR_SIZE(o) Py_SIZE(o)
    #elif PYLONG_BITS_IN_DIGIT == 30 && PY_VERSION_HEX < 0x030F0000
    #define HR_DIGITS(o) (((PyLongObject *)(o))->long_value.ob_digit)
    #define HR_SIZE(o) (((PyLongObject *)(o))->long_value.lv_tag & 3 ? 0 : (Py_ssize_t)(((PyLongObject *)(o))->long_value.lv_tag >> 3))
    #endif
    static CYTHON_INLINE unsigned long long hr_u64(PyObject *o) {
    #ifdef HR_DIGITS
        if (PyLong_CheckExact(o) && HR_SIZE(o) == 3 && HR_DIGITS(o)[2] < 16)
            return HR_DIGITS(o)[0] | (unsigned long long)HR_DIGITS(o)[1] << 30 | (unsigned long long)HR_DIGITS(o)[2] << 60;
    #endif
        return PyLong_AsUnsignedLongLong(o);
    }
    """
    unsigned long long hr_u64(PyObject *) except? 0xFFFFFFFFFFFFFFFF
    void hr_prefetch(void *) noexcept
    unsigned hr_lowest(uint64_t) noexcept

cdef extern from "Python.h":
    object PySequence_Fast(object, const char *)
    Py_ssize_t PySequence_Fast_GET_SIZE(object)
    PyObject **PySequence_Fast_ITEMS(object)


cdef class Chain:
    """Reads u64 from any sequence of int, without making objects if that is an array('Q') or a memoryview like it."""

    def __cinit__(self, blocks):
        if not isinstance(blocks, (list, tuple)) and PyObject_CheckBuffer(blocks):
            self._borrow(blocks)
            if self.buffered:
                return
        self.owner = PySequence_Fast(blocks, b"blocks must be a sequence of int")
        self.items = PySequence_Fast_ITEMS(self.owner)
        self.n = PySequence_Fast_GET_SIZE(self.owner)

    def __len__(self):
        return self.n

    def __dealloc__(self):
        if self.buffered:
            PyBuffer_Release(&self.view)

    cdef int _borrow(self, blocks) except -1:
        """Borrow the memory of `blocks`, if that is u64 one after the other."""
        try:
            PyObject_GetBuffer(blocks, &self.view, PyBUF_ND | PyBUF_FORMAT)
        except BufferError:  # every other item, say: it is read like any sequence
            return 0
        if self.view.ndim == 1 and self.view.itemsize == 8 and self.view.format != NULL and self.view.format[0] in (c"Q", c"L"):
            self.buffered = True
            self.n = self.view.len // 8
        else:
            PyBuffer_Release(&self.view)
        return 0

    cdef uint64_t value(self, Py_ssize_t place) except? 0xFFFFFFFFFFFFFFFF:
        return (<uint64_t *>self.view.buf)[place] if self.buffered else hr_u64(self.items[place])

    cdef int read(self, Py_ssize_t start, Py_ssize_t count, uint64_t *out) except -1:
        cdef Py_ssize_t i
        if self.buffered:
            memcpy(out, <uint64_t *>self.view.buf + start, count * sizeof(uint64_t))
            return 0
        for i in range(count):
            hr_prefetch(self.items[start + i])
        for i in range(count):
            out[i] = hr_u64(self.items[start + i])
        return 0


cdef inline uint64_t mixed_key(uint64_t key) noexcept:
    return key * <uint64_t>0x9E3779B97F4A7C15


cdef inline Slot *find(Shard *shards, uint64_t key) noexcept:
    """Return the slot of a key, or the empty one where it would go."""
    cdef uint64_t mixed = mixed_key(key)
    cdef Shard *shard = &shards[mixed >> 56]
    cdef uint32_t at = <uint32_t>(mixed >> 24) & shard.mask
    while shard.slots[at].holders and shard.slots[at].key != key:
        at = (at + 1) & shard.mask
    return &shard.slots[at]


cdef inline void prefetch(Shard *shards, uint64_t key) noexcept:
    cdef uint64_t mixed = mixed_key(key)
    cdef Shard *shard = &shards[mixed >> 56]
    hr_prefetch(shard.slots + (<uint32_t>(mixed >> 24) & shard.mask))


cdef int resize(Shard *shard, uint32_t size) except -1:
    cdef Slot *old = shard.slots
    cdef Slot *slots = <Slot *>calloc(size, sizeof(Slot))
    cdef uint32_t i, at, mask = size - 1
    if slots == NULL:
        raise MemoryError
    for i in range(shard.mask + 1):
        if old[i].holders:
            at = <uint32_t>(mixed_key(old[i].key) >> 24) & mask
            while slots[at].holders:
                at = (at + 1) & mask
            slots[at] = old[i]
    shard.slots = slots
    shard.mask = mask
    free(old)
    return 0


cdef int erase(Shard *shards, Slot *found) except -1:
    cdef Shard *shard = &shards[mixed_key(found.key) >> 56]
    cdef Slot *slots = shard.slots
    cdef uint32_t hole = <uint32_t>(found - slots), at = hole, home, mask = shard.mask
    while True:
        at = (at + 1) & mask
        if slots[at].holders == 0:
            break
        home = <uint32_t>(mixed_key(slots[at].key) >> 24) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):  # it may stand in the hole, being not before its home there
            slots[hole] = slots[at]
            hole = at
    slots[hole].holders = 0
    shard.count -= 1
    if mask + 1 > LEAST and shard.count * 8 < mask:
        resize(shard, (mask + 1) // 2)
    return 0


cdef inline Slot *fill(Shard *shards, Slot *found, uint64_t key) except NULL:
    """Return the slot for a key that is not there yet; `found` is what `find` says. It is empty until it is given holders."""
    cdef Shard *shard = &shards[mixed_key(key) >> 56]
    if (shard.count + 1) * 5 > (shard.mask + 1) * 4:
        resize(shard, (shard.mask + 1) * 2)
        found = find(shards, key)
    shard.count += 1
    found.key = key
    return found


cdef class Words:
    """Implements `headrace.router.index.blocks.Words`, with room to grow into."""

    def __cinit__(self, Py_ssize_t size):
        self.resize(size)

    def __dealloc__(self):
        free(self.at)

    def __len__(self):
        return self._size

    cdef int resize(self, Py_ssize_t size) except -1:
        cdef uint64_t *grown
        cdef Py_ssize_t room
        if size > self._room:
            room = size if self._room == 0 else size + size // 4
            grown = <uint64_t *>realloc(self.at, room * sizeof(uint64_t))
            if grown == NULL:
                raise MemoryError
            self.at = grown
            self._room = room
        if size > self._size:
            memset(self.at + self._size, 0, (size - self._size) * sizeof(uint64_t))
        self._size = size
        return 0

    cdef bytes packed(self, Py_ssize_t start, Py_ssize_t count):
        cdef bytes result = PyBytes_FromStringAndSize(<char *>(self.at + start), count * 8)
        if not LITTLE:
            turned = array("Q", result)
            turned.byteswap()
            result = turned.tobytes()
        return result

    @property
    def nbytes(self):
        return self._room * sizeof(uint64_t)


cdef class Blocks:
    """Implements `headrace.router.index.blocks.Blocks`."""

    implementation = "compiled"

    def __cinit__(self):
        cdef int i
        self.step = STEP
        self.batch = 256
        self.sets = self._sets
        for i in range(SHARDS):
            self.shards[i].slots = <Slot *>calloc(LEAST, sizeof(Slot))
            self.shards[i].mask = LEAST - 1
            if self.shards[i].slots == NULL:
                raise MemoryError

    def __dealloc__(self):
        cdef int i
        for i in range(SHARDS):
            free(self.shards[i].slots)

    @property
    def nbytes(self):
        cdef size_t total = 0
        cdef int i
        for i in range(SHARDS):
            total += (<size_t>self.shards[i].mask + 1) * sizeof(Slot)
        return total

    cdef uint32_t get(self, uint64_t key, uint32_t default) noexcept:
        return find(self.shards, key).holders

    cdef Chain chain(self, blocks):
        return Chain(blocks)

    cdef Py_ssize_t look(self, Chain chain, Py_ssize_t start, Py_ssize_t count) except -1:
        return self.read(chain, start, count)

    cdef int64_t at(self, Chain chain, Py_ssize_t place) except -1:
        return find(self.shards, chain.value(place)).holders

    cdef int fetch(self, Chain chain, Py_ssize_t low, Py_ssize_t step, Py_ssize_t count) except -1:
        cdef Py_ssize_t i
        if not chain.buffered:
            for i in range(1, count + 1):
                hr_prefetch(chain.items[low + i * step])
        for i in range(1, count + 1):
            prefetch(self.shards, chain.value(low + i * step))
        return 0

    cdef uint32_t lowest(self, uint64_t word) noexcept:
        return hr_lowest(word)

    cdef Py_ssize_t read(self, Chain chain, Py_ssize_t start, Py_ssize_t count) except -1:
        chain.read(start, count, self._keys)
        return self._look(count)

    cdef Py_ssize_t read_words(self, Words words, Py_ssize_t start, Py_ssize_t count) noexcept:
        memcpy(self._keys, words.at + start, count * sizeof(uint64_t))
        return self._look(count)

    cdef Py_ssize_t _look(self, Py_ssize_t count) noexcept:
        cdef Py_ssize_t i
        for i in range(count):
            prefetch(self.shards, self._keys[i])
        for i in range(count):
            self._sets[i] = find(self.shards, self._keys[i]).holders
        return count

    cdef Py_ssize_t run(self, Py_ssize_t begin, Py_ssize_t count) noexcept:
        cdef uint32_t first = self._sets[begin]
        begin += 1
        while begin < count and self._sets[begin] == first:
            begin += 1
        return begin

    cdef Py_ssize_t put(self, Py_ssize_t begin, Py_ssize_t end, uint32_t origin, uint32_t result) except -1:
        cdef Py_ssize_t i, at = begin
        cdef Slot *found
        for i in range(begin, end):
            found = find(self.shards, self._keys[i])
            if found.holders != origin:  # it came before in what was read
                continue
            if result == 0:
                erase(self.shards, found)
            else:
                if origin == 0:
                    found = fill(self.shards, found, self._keys[i])
                    found.used = self._clock
                found.holders = result
            self._keys[at] = self._keys[i]
            at += 1
        return at - begin

    cdef int append(self, Words words, Py_ssize_t begin, Py_ssize_t count) except -1:
        cdef Py_ssize_t size = words._size
        words.resize(size + count)
        memcpy(words.at + size, self._keys + begin, count * sizeof(uint64_t))
        return 0

    cdef int erase(self, uint64_t key) except -1:
        return erase(self.shards, find(self.shards, key))

    cdef int touch(self, Chain chain, Py_ssize_t start, Py_ssize_t count, Py_ssize_t length) except -1:
        cdef Py_ssize_t i, at, n
        cdef Slot *found
        for at in range(start, start + count, STEP):
            n = min(<Py_ssize_t>STEP, start + count - at)
            chain.read(at, n, self._keys)
            for i in range(n):
                prefetch(self.shards, self._keys[i])
            for i in range(n):
                found = find(self.shards, self._keys[i])
                if found.holders:
                    found.used = self._clock - <uint32_t>((at + i) * AGES // length)
        if start + count == length:
            self._clock += AGES
        return 0

    cdef list oldest(self, Py_ssize_t count):
        cdef uint64_t keys[SAMPLE]
        cdef uint32_t ages[SAMPLE]
        cdef int n = 0, i, first, round, shards = 0
        cdef Shard *shard
        cdef Slot *found
        cdef list gone = []
        while n < SAMPLE and shards <= SHARDS:
            shard = &self.shards[self._hand_shard]
            while n < SAMPLE and self._hand_slot <= shard.mask:
                found = &shard.slots[self._hand_slot]
                self._hand_slot += 1
                if found.holders:
                    keys[n] = found.key
                    ages[n] = self._clock - found.used
                    n += 1
            if self._hand_slot > shard.mask:
                self._hand_slot = 0
                self._hand_shard = (self._hand_shard + 1) % SHARDS
                shards += 1
        for round in range(max(1, min(n // 4, <int>VICTIMS))):
            if n == 0:
                break
            first = 0
            for i in range(1, n):
                if ages[i] > ages[first]:
                    first = i
            gone.append(keys[first])
            n -= 1
            keys[first] = keys[n]
            ages[first] = ages[n]
        return gone
