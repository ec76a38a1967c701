"""The hash table of the compiled index: shards of slots, open addressing, linear probing, deletion by shifting back.

Inline, because these are called for every block.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from headrace.router.index._bits cimport hr_prefetch

cdef enum:
    SHARDS = 256
    LEAST = 8         # slots of a shard

cdef struct Slot:
    uint64_t key
    uint32_t holders    # 0 = empty slot: any key is legal, 0 too
    uint32_t used       # when it was of use last, in calls

cdef struct Shard:
    Slot *slots
    uint32_t mask
    uint32_t count


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


cdef inline void prefetch(Shard *shards, uint64_t *keys, int count) noexcept:
    cdef int i
    cdef uint64_t mixed
    cdef Shard *shard
    for i in range(count):
        mixed = mixed_key(keys[i])
        shard = &shards[mixed >> 56]
        hr_prefetch(shard.slots + (<uint32_t>(mixed >> 24) & shard.mask))


cdef inline int resize(Shard *shard, uint32_t size) except -1:
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


cdef inline int erase(Shard *shards, Slot *found) except -1:
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


cdef inline Slot *find_room(Shard *shards, uint64_t key) except NULL:
    """Return the slot for a key that is not there yet. The slot is empty until it is given holders."""
    cdef Shard *shard = &shards[mixed_key(key) >> 56]
    cdef Slot *found
    if (shard.count + 1) * 5 > (shard.mask + 1) * 4:
        resize(shard, (shard.mask + 1) * 2)
    shard.count += 1
    found = find(shards, key)
    found.key = key
    return found
