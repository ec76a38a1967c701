"""A reader of the KV stream by the rules of docs/wire.md, for tests of those who write it."""

from __future__ import annotations

from headrace.broker.codec import decode, unpack_u64
from headrace.broker.messages.events import KvMessage, KvReset, KvStep

Blocks = dict[str, set[int]]


class KvReader:
    """One worker's blocks, as its messages tell them. None while they are not known."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.next = 0
        self.blocks: Blocks | None = None
        self.gaps = 0
        self.repeats = 0
        self.resets = 0
        self.steps = 0
        self._parts: Blocks = {}
        self._part = 0

    def take(self, data: bytes) -> None:
        message: KvMessage = decode(KvMessage, data)  # type: ignore[arg-type]
        if message.epoch != self.epoch:
            self.epoch, self.next, self.blocks = message.epoch, 0, {}
        if message.n < self.next:
            self.repeats += 1
            return
        if message.n > self.next:
            self.gaps += 1
            self.blocks = None
            self._part = -1
        self.next = message.n + 1
        if isinstance(message, KvStep):
            self._step(message)
        else:
            self._reset(message)

    def _step(self, step: KvStep) -> None:
        self.steps += 1
        self._part = -1  # a reset without its end is none
        if self.blocks is None:
            return
        if step.cleared:
            self.blocks = {}
        for tier, packed in step.removed.items():
            values = set(unpack_u64(packed))
            assert values <= self.blocks.get(tier, set()), "removes what it has not stored"
            self.blocks[tier] -= values
        for tier, packed in step.stored.items():
            values = set(unpack_u64(packed))
            assert not values & self.blocks.get(tier, set()), "stores what it has stored"
            self.blocks.setdefault(tier, set()).update(values)

    def _reset(self, reset: KvReset) -> None:
        if reset.part == 0:
            self._parts, self._part = {}, 0
        if reset.part != self._part:
            return
        self._part += 1
        for tier, packed in reset.blocks.items():
            self._parts.setdefault(tier, set()).update(unpack_u64(packed))
        if reset.last:
            self.resets += 1
            self.blocks, self._part = self._parts, -1

    def of(self, tier: str) -> set[int]:
        assert self.blocks is not None
        return self.blocks.get(tier, set())
