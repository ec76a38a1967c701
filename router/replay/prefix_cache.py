"""Model of a worker's prefix cache for replays: least-recently-used blocks, with the net changes since the last call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Keeps blocks by recency. Those of a prompt are touched from the last to the first, so that the tail is evicted first."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._stored: dict[int, None] = {}  # since the last `changes`, and still here
        self._removed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def match(self, chain: Sequence[int]) -> int:
        """Count the leading blocks that are cached."""
        held = self._blocks
        for count, block in enumerate(chain):
            if block not in held:
                return count
        return len(chain)

    def touch(self, chain: Sequence[int]) -> None:
        """Make these the most recent blocks: store the missing ones, and evict those beyond the capacity."""
        held, stored, removed = self._blocks, self._stored, self._removed
        for block in reversed(chain):
            if block in held:
                held.move_to_end(block)
                continue
            held[block] = None
            if block in removed:
                del removed[block]
            else:
                stored[block] = None
        while len(held) > self._most:
            block, _ = held.popitem(last=False)
            if block in stored:
                del stored[block]
            else:
                removed[block] = None

    def changes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the net changes (stored, removed) since the last call."""
        if not self._stored and not self._removed:
            return (), ()
        changed = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return changed
