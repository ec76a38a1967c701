"""Blocks that a worker is assumed to hold without an event: predicted ones, or all of a worker that sends no events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

_SLACK = 16_384  # blocks that placements may name beyond four times those that are assumed


class PredictedBlocks:
    """Ages blocks by time since they were last placed, and by capacity: those placed longest ago go first, tails before heads.

    `ttl_s` and `capacity` (blocks, 0 = no limit) may be changed at any time; `trim` makes a smaller capacity true. Placements
    are kept whole, in order, because that costs a fraction of an order of blocks.
    """

    __slots__ = ("_named", "_placed", "_placements", "_turn", "capacity", "ttl_s")

    def __init__(self, ttl_s: float, *, capacity: int = 0) -> None:
        self.ttl_s = ttl_s
        self.capacity = capacity
        self._turn = 0
        self._placed: dict[int, int] = {}  # block → turn in which it was placed last
        self._placements: deque[tuple[int, float, Sequence[int]]] = deque()  # turn, when, blocks
        self._named = 0  # blocks in all placements

    def __len__(self) -> int:
        return len(self._placed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._placed)

    def place(self, blocks: Sequence[int], now_s: float) -> list[int]:
        """Place blocks. Return those that have to go for them: some of the new ones, if they do not fit by themselves."""
        self._turn += 1
        self._placed.update(dict.fromkeys(blocks, self._turn))
        self._placements.append((self._turn, now_s, tuple(blocks)))
        self._named += len(blocks)
        if self._named > 4 * len(self._placed) + _SLACK:
            self._tidy()
        return self.trim()

    def trim(self) -> list[int]:
        gone: list[int] = []
        while self.capacity and len(self._placed) > self.capacity:
            turn, placed_s, blocks = self._placements.popleft()
            self._named -= len(blocks)
            left = len(blocks)
            while left and len(self._placed) > self.capacity:
                left -= 1
                if self._placed.get(blocks[left]) == turn:
                    del self._placed[blocks[left]]
                    gone.append(blocks[left])
            if left:
                self._placements.appendleft((turn, placed_s, blocks[:left]))
                self._named += left
        return gone

    def confirm(self, blocks: Iterable[int]) -> list[int]:
        """Drop blocks that an event has confirmed. Return those that were assumed until now."""
        if not self._placed:
            return []
        known = list(self._placed.keys() & blocks)
        for block in known:
            del self._placed[block]
        return known

    def expire(self, now_s: float) -> list[int]:
        """Drop aged blocks and return them."""
        gone: list[int] = []
        while self.next_s() <= now_s:
            turn, _, blocks = self._placements.popleft()
            self._named -= len(blocks)
            old = [block for block in blocks if self._placed.get(block) == turn]
            for block in old:
                self._placed.pop(block, None)
            gone += old
        return gone

    def next_s(self) -> float:
        """Return the time before which nothing expires; inf without any blocks."""
        return self._placements[0][1] + self.ttl_s if self._placements else float("inf")

    def clear(self) -> None:
        self._placed.clear()
        self._placements.clear()
        self._named = 0

    def _tidy(self) -> None:
        """Drop from placements the blocks that were placed again, confirmed or trimmed since."""
        placements = ((turn, at, [b for b in blocks if self._placed.get(b) == turn]) for turn, at, blocks in self._placements)
        self._placements = deque(entry for entry in placements if entry[2])
        self._named = sum(len(blocks) for _, _, blocks in self._placements)
