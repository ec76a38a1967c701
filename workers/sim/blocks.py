"""The KV cache tiers below the device: host memory, then disk.

Content that the device evicts goes down a tier. Each full tier evicts its least recently used content to the next, and the last
tier drops it.  A prefix found below is copied up, and leaves its tier once it is on the device.  While it is copied it is
pinned: it stays, and can be found, until the last copy is done.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import msgspec

from headrace.broker.codec import encode
from headrace.workers.engine import KvEvent

LowerTier = Literal["host", "disk"]
LOWER_TIERS: tuple[LowerTier, LowerTier] = ("host", "disk")


class Content(msgspec.Struct, frozen=True, gc=False):
    """The content of a full block, named by its chain value. `taint` is not 0 when the block holds something else."""

    value: int
    parent: int | None
    tokens: tuple[int, ...]
    adapter: str | None
    salt: str | None
    media: tuple[tuple[int, int], ...] = ()  # (digest, offset) of the items that touch it
    taint: int = 0

    @property
    def cell(self) -> int:
        """The value that the bytes of its block represent."""
        return fingerprint(self.value, self.taint) if self.taint else self.value


def fingerprint(*parts: object) -> int:
    """Hash these values to 64 bits, never 0."""
    return int.from_bytes(blake2b(encode(parts), digest_size=8).digest(), "little") | 1


def stored(contents: Sequence[Content], tier: Literal["device", "host", "disk"] = "device") -> KvEvent:
    """Make the event for these consecutive blocks of one chain."""
    first = contents[0]
    media = [content.media for content in contents]
    return KvEvent(
        kind="stored",
        tier=tier,
        hashes=[content.value for content in contents],
        parent=first.parent,
        token_ids=[token for content in contents for token in content.tokens],
        adapter=first.adapter,
        salt=first.salt,
        media=media if any(media) else (),
    )


@dataclass(slots=True)
class _Tier:
    name: LowerTier
    size: int
    content: OrderedDict[int, Content] = field(default_factory=OrderedDict)  # by value, oldest first
    pins: dict[int, int] = field(default_factory=dict)


class LowerTiers:
    """The host and disk tiers. Sizes are in blocks, 0 = no such tier. `emit` takes the events, in order."""

    def __init__(self, host: int, disk: int, emit: Callable[[KvEvent], None]) -> None:
        self._tiers = [_Tier(name, size) for name, size in zip(LOWER_TIERS, (host, disk), strict=True) if size]
        self._emit = emit

    def counts(self) -> dict[str, int]:
        return {tier.name: len(tier.content) for tier in self._tiers}

    def find(self, value: int) -> LowerTier | None:
        return next((tier.name for tier in self._tiers if value in tier.content), None)

    def put(self, content: Content) -> None:
        """Store content that the device evicted."""
        self._put(content, 0)

    def _put(self, content: Content, level: int) -> None:
        if level == len(self._tiers):
            return
        tier = self._tiers[level]
        if content.value in tier.content:
            tier.content[content.value] = content
            tier.content.move_to_end(content.value)
            return
        if len(tier.content) >= tier.size:
            victim = next((value for value in tier.content if value not in tier.pins), None)
            if victim is None:  # all blocks are being copied up
                self._put(content, level + 1)
                return
            self._emit(KvEvent(kind="removed", tier=tier.name, hashes=[victim]))
            self._put(tier.content.pop(victim), level + 1)
        tier.content[content.value] = content
        self._emit(stored([content], tier.name))

    def pin(self, name: LowerTier, value: int) -> Content:
        """Begin to copy this content, which `find` found in this tier, up to the device."""
        tier = self._tier(name)
        tier.pins[value] = tier.pins.get(value, 0) + 1
        tier.content.move_to_end(value)
        return tier.content[value]

    def unpin(self, name: LowerTier, value: int, *, moved: bool) -> None:
        """End a copy. With `moved` the content is on the device now and leaves this tier."""
        tier = self._tier(name)
        left = tier.pins.get(value, 0) - 1
        if left > 0:
            tier.pins[value] = left
            return
        tier.pins.pop(value, None)
        if moved and value in tier.content:
            del tier.content[value]
            self._emit(KvEvent(kind="removed", tier=name, hashes=[value]))

    def clear(self) -> None:
        """Forget everything, without events."""
        for tier in self._tiers:
            tier.content.clear()
            tier.pins.clear()

    def inventory(self) -> Iterator[KvEvent]:
        """Yield `stored` events for all content of the lower tiers."""
        return (stored([content], tier.name) for tier in self._tiers for content in tier.content.values())

    def check(self) -> None:
        """Check the bookkeeping, for tests. Raises AssertionError when it is inconsistent."""
        for tier in self._tiers:
            if len(tier.content) > tier.size or not tier.pins.keys() <= tier.content.keys():
                raise AssertionError(f"tier {tier.name} is over-full, or something that is not there is pinned")

    def _tier(self, name: LowerTier) -> _Tier:
        return next(tier for tier in self._tiers if tier.name == name)


# The simulated KV cache: paged blocks, shared by reference count, kept for reuse until room is needed.
#
# A block is in exactly one of three states: in use (held by a sequence), idle (held by none, but its content is cached; the
# least recently used one is evicted first), or blank. Blank blocks are handed out lowest number first, so the blocks of a
# sequence lie side by side where they can: transfers between machines are far cheaper that way.
#
# Content is named by its chain value (`headrace.broker.blocks`), which stands for the block's tokens and all tokens before
# them. The content that a block really holds is its *cell*: normally the same value, but not always once other machines read
# and write blocks by number.


def _nothing(blocks: Sequence[int]) -> None:
    """Do nothing: the default of `on_reuse`, for engines whose blocks have no bytes."""


class BlockManager:
    def __init__(self, blocks: int, block_size: int, *, host_blocks: int = 0, disk_blocks: int = 0) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._refs = [0] * blocks
        self._blank = list(range(blocks))  # a heap; a sorted list is a valid heap
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._content: dict[int, Content] = {}  # by block
        self._by_value: dict[int, int] = {}  # chain value → block
        self._events: list[KvEvent] = []
        self._removed: list[int] = []
        self._cells: dict[int, int] = {}  # by block, for blocks that are not in `_content`
        self.on_reuse: Callable[[Sequence[int]], None] = _nothing  # called with the blocks that no longer hold their cells
        self._tainted = False  # some block may hold something else than its value says
        self.lower = LowerTiers(host_blocks, disk_blocks, self._emit) if host_blocks or disk_blocks else None

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, evicting where needed."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        return self.blocks - self.available

    @property
    def cached(self) -> int:
        """Blocks with content that can be reused, held or idle."""
        return len(self._by_value)

    def take_prefix(self, chain: Sequence[int]) -> list[int]:
        """Hold the cached blocks of the longest known beginning of this chain."""
        taken: list[int] = []
        for value in chain:
            block = self._by_value.get(value)
            if block is None:
                break
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1
            taken.append(block)
        return taken

    def known(self, chain: Sequence[int]) -> int:
        """Count the blocks at the beginning of this chain that are cached."""
        for n, value in enumerate(chain):
            if value not in self._by_value:
                return n
        return len(chain)

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` empty blocks. Returns None, and changes nothing, when there are not so many."""
        if count > len(self._blank) + len(self._idle):
            return None
        taken = [heapq.heappop(self._blank) if self._blank else self._evict() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        if self._cells:
            self.on_reuse([block for block in taken if self._cells.pop(block, None) is not None])
        return taken

    def keep(self, blocks: Sequence[int]) -> None:
        """Add a reference to these held blocks; `release` drops it."""
        for block in blocks:
            if self._refs[block] == 0:
                raise AssertionError(f"block {block} is kept by nobody yet")
            self._refs[block] += 1

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        content = self._content.pop(block)
        del self._by_value[content.value]
        self._removed.append(content.value)
        if self.lower is not None:
            self.lower.put(content)
        return block

    def has(self, value: int) -> bool:
        """Return true when this content is on the device."""
        return value in self._by_value

    def commit(self, blocks: Sequence[int], contents: Sequence[Content]) -> None:
        """Cache these held blocks, which are full now and consecutive in one chain, and announce the new ones.

        A value that is cached already keeps its first block; the second copy is private to its sequence.
        """
        fresh: list[Content] = []
        for block, content in zip(blocks, contents, strict=True):
            self._tainted = self._tainted or content.taint != 0
            if content.value in self._by_value:
                if fresh:
                    self._emit(stored(fresh))
                fresh = []
            else:
                self._by_value[content.value] = block
                self._content[block] = content
                fresh.append(content)
        if fresh:
            self._emit(stored(fresh))

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a sequence's blocks, given in order. Cached ones become idle; the end of the sequence is evicted first."""
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            if refs < 0:
                raise AssertionError(f"block {block} was released by nobody who held it")
            self._refs[block] = refs
            if refs == 0:
                if block in self._content:
                    self._idle[block] = None
                else:
                    heapq.heappush(self._blank, block)

    def clear(self) -> None:
        """Forget all cached content, in every tier; held blocks stay held."""
        self._forget()
        if self.lower is not None:
            self.lower.clear()
        self._emit(KvEvent(kind="cleared"))

    def clear_device(self) -> None:
        """Forget the content on the device; the tiers below keep theirs. Nothing is written to them."""
        self._removed += self._by_value
        self._forget()
        self.on_reuse(list(self._cells))
        self._cells.clear()
        if self._removed:
            self._flush_removed()

    def _forget(self) -> None:
        for block in self._idle:
            heapq.heappush(self._blank, block)
        self._idle.clear()
        self._content.clear()
        self._by_value.clear()

    # -- what blocks really hold -----------------------------------------------------------------------------

    def cell(self, block: int) -> int:
        """Return the content of this block: a chain value, a fingerprint of a partial block, or an unknown value."""
        content = self._content.get(block)
        if content is not None:
            return content.cell
        return self._cells.get(block) or fingerprint("unknown", block)

    def set_cell(self, block: int, cell: int) -> None:
        """Set the content of this block; valid until it is allocated anew."""
        self._cells[block] = cell

    def taint(self, blocks: Sequence[int]) -> int:
        """Return 0 when all of these blocks hold what their values say, else the first taint among them."""
        if not self._tainted:
            return 0
        return next(
            (self._content[block].taint for block in blocks if block in self._content and self._content[block].taint), 0
        )

    # -- events ----------------------------------------------------------------------------------------------

    def take_events(self) -> list[KvEvent]:
        if self._removed:
            self._flush_removed()
        events, self._events = self._events, []
        return events

    def inventory(self) -> list[KvEvent]:
        """Return `stored` events for all that is cached: applied after a `cleared`, they give the complete state."""
        device = [stored([content]) for content in self._content.values()]
        return device if self.lower is None else device + list(self.lower.inventory())

    def snapshot(self) -> list[KvEvent]:
        """Return the `inventory` for a new reader. It includes all changes until now; their events are dropped."""
        self.take_events()
        return self.inventory()

    def _emit(self, event: KvEvent) -> None:
        if self._removed:
            self._flush_removed()
        self._events.append(event)

    def _flush_removed(self) -> None:
        self._events.append(KvEvent(kind="removed", hashes=self._removed))
        self._removed = []

    def check(self) -> None:
        """Check the bookkeeping, for tests. Raises AssertionError when it is inconsistent."""
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        blank, idle = set(self._blank), set(self._idle)
        if min(self._refs, default=0) < 0:
            raise AssertionError("a reference count is negative")
        places = sorted([*held, *self._blank, *idle])
        if places != list(range(self.blocks)):
            raise AssertionError("a block is in two places, or in none")
        if not idle <= self._content.keys() or blank & self._content.keys():
            raise AssertionError("an idle block has no content, or a blank one has")
        if self._by_value != {content.value: block for block, content in self._content.items()}:
            raise AssertionError("the two views of the content differ")
        if self.lower is not None:
            self.lower.check()
