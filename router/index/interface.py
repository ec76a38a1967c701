"""The index as this package builds it: what `PrefixIndex` promises, and room for blocks that nobody has confirmed yet.

*Assumed* blocks are those a worker will hold soon, or is taken to hold because it sends no events.  They count as `device` in a
match, and for nothing else: `blocks`, `count` and `len` speak of what events said, so that a snapshot never holds a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from headrace.router.index.types import Overlap, PrefixIndex, Tier

OnEvict = Callable[[list[int]], None]

PLANES: Final = 4  # the tiers in their order, then the assumed blocks
ASSUMED: Final = 3
ROUND: Final = 4  # blocks that a galloping match looks at before it decides where to look on
PLANE_OF: Final[dict[str, int]] = {"device": 0, "host": 1, "disk": 2}


class BlockTable(PrefixIndex, Protocol):
    """Both implementations, pure and compiled, are this. They answer alike, but for which block they evict.

    Values of blocks are u64; what is none raises OverflowError or TypeError at the latest when the table is dumped.
    """

    implementation: str  # pure or compiled
    max_entries: int  # entries (block, worker, tier), assumed ones included, before the least useful blocks go; 0 = no limit
    on_evict: OnEvict | None  # called with the blocks that were evicted, after each operation that had to

    @property
    def evicted(self) -> int:
        """Blocks evicted for want of room since the index was made."""

    @property
    def assumed(self) -> int:
        """Entries (block, worker) that are assumed."""

    @property
    def nbytes(self) -> int:
        """Memory that the tables take, without what the interpreter needs for itself. The pure one estimates."""

    def match_exact(self, chain: Sequence[int]) -> Mapping[str, Overlap]:
        """`match` with every block looked at, as far as anybody has them. Counts as use of these blocks where there is a limit,
        as `match_worker` does and `match` does not: half a chain that was used would be the next to go."""

    def assume(self, worker: str, blocks: Sequence[int]) -> None:
        """Raises UnknownWorker."""

    def unassume(self, worker: str, blocks: Sequence[int]) -> None:
        """Blocks that are not assumed are fine. Raises UnknownWorker."""


def plane_of(tier: Tier) -> int:
    """Raises ValueError that names a tier which does not exist."""
    plane = PLANE_OF.get(tier)
    if plane is None:
        raise ValueError(f"tier {tier!r} is none of {', '.join(PLANE_OF)}")
    return plane
