"""Types of `table.py` for its compiled form, the module `_table`."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from headrace.router.index._blocks cimport Blocks as CBlocks, Chain, Ulongs, Words as CWords

cdef Py_ssize_t ALL, ASSUMED, PLANES, ROUND, _SWEEP
cdef object _overlap_new
cdef list _ALIKE


cdef class WorkerSets:
    cdef readonly Py_ssize_t words, row
    cdef CWords bits, refs, _changed
    cdef dict _numbers
    cdef list _free, dead

    cdef bint has(self, int64_t which, Py_ssize_t plane, Py_ssize_t slot) noexcept
    @cython.locals(bits=Ulongs, at=Py_ssize_t, words=Py_ssize_t)
    cdef bint has_any(self, int64_t which, Py_ssize_t slot) noexcept
    @cython.locals(bits=Ulongs, at=Py_ssize_t, words=Py_ssize_t, shift=Py_ssize_t, tier=Py_ssize_t)
    cdef Py_ssize_t tier(self, int64_t which, Py_ssize_t slot) noexcept
    @cython.locals(
        bits=Ulongs, row=Ulongs, words=Py_ssize_t, base=Py_ssize_t, x=Py_ssize_t, each=Py_ssize_t, bit=uint64_t, which=int64_t,
    )
    cdef int64_t changed(self, int64_t origin, Py_ssize_t plane, Py_ssize_t slot, bint held) except -1
    @cython.locals(refs=Ulongs)
    cdef move(self, int64_t origin, int64_t result, Py_ssize_t count)
    @cython.locals(which=int64_t)
    cdef sweep(self)
    @cython.locals(
        old=CWords, numbers=dict, before=Py_ssize_t, row=Py_ssize_t, which=int64_t, plane=Py_ssize_t, x=Py_ssize_t,
    )
    cdef widen(self, Py_ssize_t words)
    cdef _grow(self)


cdef class Record:
    cdef readonly CWords keys
    cdef readonly Py_ssize_t gone
    cdef readonly list counts
    cdef readonly uint64_t changes


cdef class PrefixTable:
    cdef readonly str implementation
    cdef readonly Py_ssize_t evicted
    cdef public Py_ssize_t max_entries
    cdef public object on_evict
    cdef object _new_blocks, _new_words
    cdef CBlocks _blocks
    cdef WorkerSets _sets
    cdef object _slots
    cdef dict _found
    cdef list _names, _records, _entries
    cdef CWords _alive, _reach
    cdef Py_ssize_t _tiers
    cdef int64_t _same

    @cython.locals(slot=Py_ssize_t)
    cpdef add_worker(self, str worker)
    @cython.locals(slot=Py_ssize_t, record=Record, empty=Record, step=Py_ssize_t, size=Py_ssize_t, start=Py_ssize_t)
    cpdef clear(self, str worker)
    @cython.locals(
        table=CBlocks, sets=WorkerSets, record=Record, chain=Chain, length=Py_ssize_t, start=Py_ssize_t, step=Py_ssize_t,
        count=Py_ssize_t, begin=Py_ssize_t, added=Py_ssize_t, origin=int64_t, end=Py_ssize_t, result=int64_t, moved=Py_ssize_t,
    )
    cdef _add(self, Py_ssize_t slot, Py_ssize_t plane, blocks)
    @cython.locals(table=CBlocks, record=Record, chain=Chain, length=Py_ssize_t, start=Py_ssize_t, gone=Py_ssize_t)
    cdef _remove(self, Py_ssize_t slot, Py_ssize_t plane, blocks)
    @cython.locals(
        table=CBlocks, sets=WorkerSets, record=Record, begin=Py_ssize_t, taken=Py_ssize_t, origin=int64_t, end=Py_ssize_t,
        result=int64_t, moved=Py_ssize_t,
    )
    cdef Py_ssize_t _take(self, Py_ssize_t slot, Py_ssize_t plane, Py_ssize_t count) except -1
    @cython.locals(
        table=CBlocks, read=Chain, last=Py_ssize_t, parts=Py_ssize_t, step=Py_ssize_t, which=int64_t, low=Py_ssize_t,
        i=Py_ssize_t, at=Py_ssize_t,
    )
    cpdef dict match(self, chain)
    @cython.locals(
        table=CBlocks, read=Chain, length=Py_ssize_t, which=int64_t, start=Py_ssize_t, left=bint, begin=Py_ssize_t,
        count=Py_ssize_t,
    )
    cpdef dict match_exact(self, chain)
    @cython.locals(
        slot=Py_ssize_t, record=Record, table=CBlocks, sets=WorkerSets, read=Chain, length=Py_ssize_t, start=Py_ssize_t,
        left=bint, device=Py_ssize_t, host=Py_ssize_t, begin=Py_ssize_t, count=Py_ssize_t, which=int64_t, end=Py_ssize_t,
        tier=Py_ssize_t,
    )
    cpdef match_worker(self, str worker, chain)
    @cython.locals(slot=Py_ssize_t, plane=Py_ssize_t, record=Record, found=CWords)
    cpdef bytes blocks(self, str worker, tier)
    @cython.locals(
        bits=Ulongs, alive=Ulongs, words=Py_ssize_t, base=Py_ssize_t, x=Py_ssize_t, tier=Py_ssize_t, held=uint64_t,
    )
    cdef _begin(self, int64_t which, dict found)
    @cython.locals(
        bits=Ulongs, alive=Ulongs, words=Py_ssize_t, base=Py_ssize_t, x=Py_ssize_t, tier=Py_ssize_t, held=uint64_t,
    )
    cdef bint _drops(self, int64_t which) noexcept
    @cython.locals(
        bits=Ulongs, alive=Ulongs, words=Py_ssize_t, base=Py_ssize_t, reach=Ulongs, found=dict, names=list, last=Py_ssize_t,
        left=bint, x=Py_ssize_t, tier=Py_ssize_t, held=uint64_t, gone=uint64_t, slot=Py_ssize_t,
        device=Py_ssize_t, host=Py_ssize_t,
    )
    cdef bint _drop(self, int64_t which, Py_ssize_t at) except -1
    @cython.locals(gap=Py_ssize_t, parts=Py_ssize_t, step=Py_ssize_t, at=Py_ssize_t)
    cdef bint _narrow(self, Chain chain, Py_ssize_t low, Py_ssize_t high, int64_t which) except -1
    cdef Py_ssize_t _held(self) except -1
    @cython.locals(
        table=CBlocks, sets=WorkerSets, record=Record, keys=CWords, found=CWords, end=Py_ssize_t, some=Py_ssize_t,
        begin=Py_ssize_t, stop=Py_ssize_t, which=int64_t,
    )
    cpdef CWords _part(self, Py_ssize_t slot, Py_ssize_t plane, Py_ssize_t start, Py_ssize_t count)
    @cython.locals(start=Py_ssize_t, end=Py_ssize_t, found=CWords, some=Py_ssize_t, begin=Py_ssize_t, stop=Py_ssize_t)
    cpdef CWords _unseen(self, CWords keys, CBlocks seen)
    @cython.locals(record=Record)
    cdef _clean(self, Py_ssize_t slot)
    @cython.locals(target=Py_ssize_t)
    cdef _make_room(self)
    @cython.locals(
        table=CBlocks, sets=WorkerSets, which=int64_t, bits=Ulongs, words=Py_ssize_t, base=Py_ssize_t, x=Py_ssize_t,
        plane=Py_ssize_t, held=uint64_t, anywhere=uint64_t, record=Record,
    )
    cdef bint _evict(self, uint64_t block) except -1
