"""The simulated KV cache: paged blocks, shared by reference count, kept for reuse until room is needed.

A block is in exactly one of three places: in use (some sequence holds it), idle (nobody holds it but its content is cached;
the least recently used one is evicted first), or blank.  Blank blocks are handed out lowest number first, so the blocks of a
sequence lie side by side where they can: transfers between machines are far cheaper that way.

Content is named by its chain value (`broker.blocks`), which stands for the block's tokens and all tokens before them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine import KvEvent


@dataclass(frozen=True, slots=True)
class _Content:
    value: int
    parent: int | None
    tokens: tuple[int, ...]
    adapter: str | None
    salt: str | None


class BlockManager:
    """All blocks of one engine. Not thread-safe."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._refs = [0] * blocks
        self._blank = list(range(blocks))  # a heap; a sorted list is one
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._content: dict[int, _Content] = {}  # by block
        self._by_value: dict[int, int] = {}  # chain value → block
        self._events: list[KvEvent] = []
        self._removed: list[int] = []

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, evicting where needed."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
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

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` empty blocks, or None (and nothing changes) when there are not so many."""
        if count > self.available:
            return None
        taken = [heapq.heappop(self._blank) if self._blank else self._evict() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        value = self._content.pop(block).value
        del self._by_value[value]
        self._removed.append(value)
        return block

    def commit(
        self,
        blocks: Sequence[int],
        values: Sequence[int],
        tokens: Sequence[int],
        *,
        parent: int | None,
        adapter: str | None = None,
        salt: str | None = None,
    ) -> None:
        """These consecutive held blocks are full now: `values` names them, `tokens` are theirs, `parent` is the value
        before them, None at the beginning of a chain.

        A value that is cached already keeps its first block; the second copy is private to its sequence.
        """
        size = self.block_size
        fresh: list[_Content] = []
        for n, (block, value) in enumerate(zip(blocks, values, strict=True)):
            if value in self._by_value:
                self._announce(fresh)
                fresh = []
            else:
                content = _Content(value, parent, tuple(tokens[n * size : (n + 1) * size]), adapter, salt)
                self._by_value[value] = block
                self._content[block] = content
                fresh.append(content)
            parent = value
        self._announce(fresh)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, given in order. Cached ones become idle; of these its end is evicted first."""
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
        """Forget all cached content; held blocks stay held."""
        for block in self._idle:
            heapq.heappush(self._blank, block)
        self._idle.clear()
        self._content.clear()
        self._by_value.clear()
        self._flush_removed()
        self._events.append(KvEvent(kind="cleared"))

    # -- events ----------------------------------------------------------------------------------------------

    def take_events(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def inventory(self) -> list[KvEvent]:
        """`stored` events for all that is cached: applied after a `cleared`, they give the whole truth."""
        return [_stored([content]) for content in self._content.values()]

    def _announce(self, contents: list[_Content]) -> None:
        if contents:
            self._flush_removed()
            self._events.append(_stored(contents))

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(KvEvent(kind="removed", hashes=self._removed))
            self._removed = []

    def check(self) -> None:
        """For tests: raises AssertionError when the books do not balance."""
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


def _stored(contents: Sequence[_Content]) -> KvEvent:
    first = contents[0]
    return KvEvent(
        kind="stored",
        hashes=[content.value for content in contents],
        parent=first.parent,
        token_ids=[token for content in contents for token in content.tokens],
        adapter=first.adapter,
        salt=first.salt,
    )
