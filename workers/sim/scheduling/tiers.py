"""The KV cache tiers below the device: host memory, then disk.

Content that the device evicts goes down a tier. Each full tier evicts its least recently used content to the next, and the last
tier drops it.  A prefix found below is copied up, and leaves its tier once it is on the device.  While it is copied it is
pinned: it stays, and can be found, until the last copy is done.
"""

from __future__ import annotations

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
    return KvEvent(
        kind="stored",
        tier=tier,
        hashes=[content.value for content in contents],
        parent=first.parent,
        token_ids=[token for content in contents for token in content.tokens],
        adapter=first.adapter,
        salt=first.salt,
        media=[content.media for content in contents] if any(content.media for content in contents) else (),
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
        """Count the blocks cached in each existing tier."""
        return {tier.name: len(tier.content) for tier in self._tiers}

    def find(self, value: int) -> LowerTier | None:
        """Return the highest tier that has this content."""
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
