from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

ctypedef uint64_t *Ulongs

cdef enum:
    SHARDS = 256
    STEP = 256          # blocks looked up at once

cdef struct Slot:
    uint64_t key
    uint32_t holders    # 0 = empty slot: any key is legal, 0 too
    uint32_t used       # when it was of use last, in calls

cdef struct Shard:
    Slot *slots
    uint32_t mask
    uint32_t count


cdef class Chain:
    cdef Py_ssize_t n
    cdef object owner
    cdef Py_buffer view
    cdef bint buffered
    cdef PyObject **items

    cdef uint64_t value(self, Py_ssize_t place) except? 0xFFFFFFFFFFFFFFFF
    cdef int read(self, Py_ssize_t start, Py_ssize_t count, uint64_t *out) except -1
    cdef int _borrow(self, blocks) except -1


cdef class Words:
    cdef uint64_t *at
    cdef Py_ssize_t _size, _room

    cdef int resize(self, Py_ssize_t size) except -1
    cdef bytes packed(self, Py_ssize_t start, Py_ssize_t count)


cdef class Blocks:
    cdef readonly Py_ssize_t step, batch
    cdef uint32_t *sets
    cdef Shard shards[SHARDS]
    cdef uint64_t _keys[STEP]
    cdef uint32_t _sets[STEP]
    cdef uint32_t _clock, _hand_shard, _hand_slot

    cdef uint32_t get(self, uint64_t key, uint32_t default) noexcept
    cdef Chain chain(self, blocks)
    cdef Py_ssize_t look(self, Chain chain, Py_ssize_t start, Py_ssize_t count) except -1
    cdef int64_t at(self, Chain chain, Py_ssize_t place) except -1
    cdef int fetch(self, Chain chain, Py_ssize_t low, Py_ssize_t step, Py_ssize_t count) except -1
    cdef uint32_t lowest(self, uint64_t word) noexcept
    cdef Py_ssize_t read(self, Chain chain, Py_ssize_t start, Py_ssize_t count) except -1
    cdef Py_ssize_t read_words(self, Words words, Py_ssize_t start, Py_ssize_t count) noexcept
    cdef Py_ssize_t _look(self, Py_ssize_t count) noexcept
    cdef Py_ssize_t run(self, Py_ssize_t begin, Py_ssize_t count) noexcept
    cdef Py_ssize_t put(self, Py_ssize_t begin, Py_ssize_t end, uint32_t origin, uint32_t result) except -1
    cdef int append(self, Words words, Py_ssize_t begin, Py_ssize_t count) except -1
    cdef int erase(self, uint64_t key) except -1
    cdef int touch(self, Chain chain, Py_ssize_t start, Py_ssize_t count, Py_ssize_t length) except -1
    cdef list oldest(self, Py_ssize_t count)
