"""Interface of the index as this package builds it: a `PrefixIndex` that also has room for unconfirmed blocks.

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
    """The interface of both implementations, pure and compiled. They answer alike, but for the blocks that they evict.

    Values of blocks are u64; another value raises OverflowError or TypeError at the latest when the table is dumped.
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
        """Bytes that the tables take, without the interpreter's own. The pure index estimates them."""

    def match_exact(self, chain: Sequence[int]) -> Mapping[str, Overlap]:
        """Match with every block compared, as far as any worker has them.

        Where there is a limit, the blocks count as used, as by `match_worker` and not by `match`: half a chain that was used
        would be the next to go.
        """

    def assume(self, worker: str, blocks: Sequence[int]) -> None:
        """Count these blocks as assumed. Raises UnknownWorker."""

    def unassume(self, worker: str, blocks: Sequence[int]) -> None:
        """Count these blocks as assumed no longer. Others are ignored. Raises UnknownWorker."""


def plane_of(tier: Tier) -> int:
    """Return the plane of a tier. Raises ValueError that names a tier which does not exist."""
    plane = PLANE_OF.get(tier)
    if plane is None:
        raise ValueError(f"tier {tier!r} is none of {', '.join(PLANE_OF)}")
    return plane
