# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Sets of workers, each kept once. An entry of the compiled index points to a set instead of holding bits itself.

A set has one row of bits per plane (tier or assumption).  Blocks of one prompt have the same holders and most blocks have one
holder, so there are few sets; an entry stays 16 bytes for any number of workers, and a match need only look at the bits where
the set changes from one block to the next.  Set 0 is the empty one.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

cdef enum:
    PLANES = 4

cdef uint32_t FREE = 0xFFFFFFFF


cdef void *_grown(void *memory, size_t size) except NULL:
    cdef void *larger = realloc(memory, size)
    if larger == NULL:
        raise MemoryError
    return larger


cdef class Holders:
    def __cinit__(self):
        self._size = 1
        self._capacity = 64
        self._n_buckets = 64
        self.words = 1
        self.row = PLANES
        self.bits = <uint64_t *>calloc(self._capacity * self.row, sizeof(uint64_t))
        self.refs = <uint32_t *>calloc(self._capacity, sizeof(uint32_t))
        self._hashes = <uint32_t *>calloc(self._capacity, sizeof(uint32_t))
        self._next = <uint32_t *>calloc(self._capacity, sizeof(uint32_t))
        self._buckets = <uint32_t *>calloc(self._n_buckets, sizeof(uint32_t))
        self._scratch = <uint64_t *>calloc(self.row, sizeof(uint64_t))
        if not (self.bits and self.refs and self._hashes and self._next and self._buckets and self._scratch):
            raise MemoryError

    def __dealloc__(self):
        free(self.bits)
        free(self.refs)
        free(self._hashes)
        free(self._next)
        free(self._buckets)
        free(self._scratch)
        free(self._dead)

    cdef bint has(self, uint32_t which, int plane, uint32_t slot) noexcept:
        return (self.bits[<size_t>which * self.row + plane * self.words + (slot >> 6)] >> (slot & 63)) & 1

    cdef bint has_any(self, uint32_t which, uint32_t slot) noexcept:
        cdef uint64_t *at = self.bits + <size_t>which * self.row + (slot >> 6)
        cdef uint32_t words = self.words
        return ((at[0] | at[words] | at[2 * words] | at[3 * words]) >> (slot & 63)) & 1

    cdef uint32_t changed(self, uint32_t origin, int plane, uint32_t slot, bint held) except? 0:
        """Return the set that differs from `origin` in this worker only; plane -1 means all planes.

        It has no reference yet: take one before `sweep`.
        """
        cdef uint64_t bit = (<uint64_t>1) << (slot & 63)
        cdef uint32_t at = slot >> 6
        cdef int each
        memcpy(self._scratch, self.bits + <size_t>origin * self.row, self.row * sizeof(uint64_t))
        for each in range(PLANES):
            if plane < 0 or each == plane:
                if held:
                    self._scratch[each * self.words + at] |= bit
                else:
                    self._scratch[each * self.words + at] &= ~bit
        return self._intern()

    cdef int release(self, uint32_t which) except -1:
        """Drop a reference. A set without blocks stays valid until `sweep`, for callers that remember it meanwhile."""
        if which == 0:
            return 0
        self.refs[which] -= 1
        if self.refs[which] == 0:
            if self._n_dead == self._dead_capacity:
                self._dead = <uint32_t *>_grown(self._dead, (2 * self._dead_capacity + 64) * sizeof(uint32_t))
                self._dead_capacity = 2 * self._dead_capacity + 64
            self._dead[self._n_dead] = which
            self._n_dead += 1
        return 0

    cdef int sweep(self) except -1:
        """Free the sets that no block has."""
        cdef uint32_t i, which
        cdef uint32_t *link
        for i in range(self._n_dead):
            which = self._dead[i]
            if self.refs[which] != 0:  # in use again, or freed already
                continue
            link = &self._buckets[self._hashes[which] & (self._n_buckets - 1)]
            while link[0] != which:
                link = &self._next[link[0]]
            link[0] = self._next[which]
            self.refs[which] = FREE
            self._next[which] = self._free
            self._free = which
            self.live -= 1
        self._n_dead = 0
        return 0

    cdef int widen(self, uint32_t words) except -1:
        """Make room for 64 × `words` workers."""
        cdef uint32_t row = PLANES * words
        cdef uint32_t which
        cdef int plane
        cdef uint64_t *bits = <uint64_t *>calloc(<size_t>self._capacity * row, sizeof(uint64_t))
        cdef uint64_t *scratch = <uint64_t *>calloc(row, sizeof(uint64_t))
        if not (bits and scratch):
            free(bits)
            free(scratch)
            raise MemoryError
        for which in range(self._size):
            for plane in range(PLANES):
                memcpy(
                    bits + <size_t>which * row + plane * words,
                    self.bits + <size_t>which * self.row + plane * self.words,
                    self.words * sizeof(uint64_t),
                )
        free(self.bits)
        free(self._scratch)
        self.bits = bits
        self._scratch = scratch
        self.words = words
        self.row = row
        for which in range(1, self._size):
            self._hashes[which] = _hash(self.bits + <size_t>which * row, row)
        self._rebucket(self._n_buckets)
        return 0

    cdef size_t nbytes(self) noexcept:
        return (
            <size_t>self._capacity * (self.row * sizeof(uint64_t) + 3 * sizeof(uint32_t))
            + (<size_t>self._n_buckets + self._dead_capacity) * sizeof(uint32_t)
        )

    cdef uint32_t _intern(self) except? 0:
        """Return the set whose bits are in scratch."""
        cdef uint32_t i, hashed, which
        for i in range(self.row):
            if self._scratch[i]:
                break
        else:
            return 0
        hashed = _hash(self._scratch, self.row)
        which = self._buckets[hashed & (self._n_buckets - 1)]
        while which:
            if self._hashes[which] == hashed and memcmp(
                self.bits + <size_t>which * self.row, self._scratch, self.row * sizeof(uint64_t)
            ) == 0:
                return which
            which = self._next[which]
        which = self._place()
        memcpy(self.bits + <size_t>which * self.row, self._scratch, self.row * sizeof(uint64_t))
        self.refs[which] = 0
        self._hashes[which] = hashed
        self._next[which] = self._buckets[hashed & (self._n_buckets - 1)]
        self._buckets[hashed & (self._n_buckets - 1)] = which
        self.live += 1
        if self.live > self._n_buckets:
            self._rebucket(self._n_buckets * 2)
        return which

    cdef uint32_t _place(self) except 0:
        cdef uint32_t which = self._free
        cdef size_t capacity
        if which:
            self._free = self._next[which]
            return which
        if self._size == self._capacity:
            capacity = <size_t>self._capacity + self._capacity // 2
            if capacity >= 0x7FFFFFFF:
                raise MemoryError("more than 2^31 different sets of workers")
            self.bits = <uint64_t *>_grown(self.bits, capacity * self.row * sizeof(uint64_t))
            self.refs = <uint32_t *>_grown(self.refs, capacity * sizeof(uint32_t))
            self._hashes = <uint32_t *>_grown(self._hashes, capacity * sizeof(uint32_t))
            self._next = <uint32_t *>_grown(self._next, capacity * sizeof(uint32_t))
            self._capacity = <uint32_t>capacity
        which = self._size
        self._size += 1
        return which

    cdef int _rebucket(self, uint32_t n_buckets) except -1:
        cdef uint32_t which
        cdef uint32_t *buckets = <uint32_t *>calloc(n_buckets, sizeof(uint32_t))
        if buckets == NULL:
            raise MemoryError
        free(self._buckets)
        self._buckets = buckets
        self._n_buckets = n_buckets
        for which in range(1, self._size):
            if self.refs[which] != FREE:
                self._next[which] = buckets[self._hashes[which] & (n_buckets - 1)]
                buckets[self._hashes[which] & (n_buckets - 1)] = which
        return 0


cdef uint32_t _hash(uint64_t *bits, uint32_t n) noexcept:
    cdef uint64_t value = 0
    cdef uint32_t i
    for i in range(n):
        value = (value ^ bits[i]) * <uint64_t>0x9E3779B97F4A7C15
        value ^= value >> 32
    return <uint32_t>value
