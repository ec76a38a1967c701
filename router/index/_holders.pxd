from libc.stdint cimport uint32_t, uint64_t


cdef class Holders:
    cdef uint64_t *bits       # per set: a row of `words` words for each plane
    cdef uint32_t *refs       # blocks that are held by exactly this set; FREE when there is no such set
    cdef uint32_t words       # 64 workers each
    cdef uint32_t row         # words of a whole set
    cdef uint32_t live        # sets in use
    cdef uint32_t *_hashes
    cdef uint32_t *_next      # of the same bucket, or of the free list
    cdef uint32_t *_buckets
    cdef uint32_t _size, _capacity, _n_buckets, _free
    cdef uint64_t *_scratch
    cdef uint32_t *_dead
    cdef uint32_t _n_dead, _dead_capacity

    cdef uint32_t changed(self, uint32_t origin, int plane, uint32_t slot, bint held) except? 0
    cdef int release(self, uint32_t which) except -1
    cdef int sweep(self) except -1
    cdef int widen(self, uint32_t words) except -1
    cdef bint has(self, uint32_t which, int plane, uint32_t slot) noexcept
    cdef bint has_any(self, uint32_t which, uint32_t slot) noexcept
    cdef size_t nbytes(self) noexcept
    cdef uint32_t _intern(self) except? 0
    cdef uint32_t _place(self) except 0
    cdef int _rebucket(self, uint32_t n_buckets) except -1
