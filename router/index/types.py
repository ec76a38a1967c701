"""Types of the index: the overlap of a prompt with a worker's cache, and the interfaces that the rest of the router uses.

All block names are chain values (`headrace.broker.blocks`), u64; a *chain* is the list of a prompt's values in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class Overlap(NamedTuple):
    """The leading blocks of a chain that a worker has.

    `device` is the longest prefix in device memory; `host` counts the blocks beyond it that are in device or host memory, and
    `disk` the blocks beyond those that are in any tier.
    """

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk


NO_OVERLAP = Overlap()


class PrefixIndex(Protocol):
    """Maps a chain value to the workers that hold the block, per tier."""

    def add_worker(self, worker: str) -> None:
        """Add a worker without blocks. A known one keeps its blocks."""

    def drop_worker(self, worker: str) -> None:
        """Drop a worker and its blocks. An unknown one is ignored."""

    def workers(self) -> Sequence[str]: ...

    def store(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a worker holds these blocks. Raises UnknownWorker."""

    def remove(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a worker holds these blocks no longer. Others are ignored. Raises UnknownWorker."""

    def clear(self, worker: str) -> None:
        """Drop all blocks of a worker. Raises UnknownWorker."""

    def match(self, chain: Sequence[int]) -> Mapping[str, Overlap]:
        """Return the overlap of every worker that has at least the first block in some tier.

        May gallop: where a worker has two blocks of the chain it is trusted to have those between, for it cannot have computed
        the later one without them. Both sides of each end it reports were looked at: the worker has the last block and not the
        next. So for a worker that has lost a block in the middle and kept later ones the answer may be too long, never too
        short; `match_worker` tells.
        """

    def match_worker(self, worker: str, chain: Sequence[int]) -> Overlap:
        """Return the overlap of one worker, with every block compared. Raises UnknownWorker."""

    def blocks(self, worker: str, tier: Tier) -> bytes:
        """Return all blocks of a worker in a tier as u64 little endian, in no order. Raises UnknownWorker."""

    def iter_blocks(self, worker: str, tier: Tier, size: int) -> Iterator[bytes]:
        """Iterate over `blocks` in parts of at most `size`, some perhaps empty, each taken when it is asked for.

        Raises RuntimeError for the next part if events changed the worker's blocks meanwhile; ValueError for a size below 1;
        UnknownWorker.
        """

    def count(self, worker: str) -> int:
        """Count the entries (block, tier) of a worker. Raises UnknownWorker."""

    def __len__(self) -> int:
        """Count all entries (block, worker, tier)."""


class CacheView(Protocol):
    """The scheduler's view of all caches: blocks by events and blocks predicted from placements, matched with waiting requests.

    `now_s` is of any monotonic clock, the same for all calls.
    """

    def add_worker(self, worker: str, *, approximate: bool = False, capacity_blocks: int = 0) -> None:
        """Add a worker, or change its mode.

        `approximate`: the worker sends no events, and its blocks are those that were placed there, aged by TTL and capacity
        (0 = no limit).
        """

    def drop_worker(self, worker: str) -> None: ...

    def apply(
        self,
        worker: str,
        *,
        cleared: bool = False,
        removed: Mapping[Tier, Sequence[int]],
        stored: Mapping[Tier, Sequence[int]],
        now_s: float,
    ) -> None:
        """Apply an engine step: first cleared, then removed, then stored. Confirms predictions. Raises UnknownWorker."""

    def replace(self, worker: str, blocks: Mapping[Tier, Sequence[int]], *, now_s: float) -> None:
        """Replace all blocks of a worker. Raises UnknownWorker."""

    def predict(self, worker: str, blocks: Sequence[int], *, now_s: float) -> None:
        """Predict the blocks of a request that was placed on this worker.

        They count as `device` at once, until they are confirmed or expire; of an approximate worker they are its blocks. An
        unknown worker is ignored (it has left meanwhile).
        """

    def expire(self, now_s: float) -> None:
        """Drop predictions that were never confirmed, and aged blocks of approximate workers."""

    def track(self, request_id: str, chain: Sequence[int]) -> None:
        """Keep the overlaps of a waiting request current from now on."""

    def untrack(self, request_id: str) -> None:
        """Forget a request. An unknown one is ignored."""

    def overlaps(self, request_id: str) -> Mapping[str, Overlap]:
        """Return the current overlaps of a tracked request: cached, and recomputed only for later changes.

        The mapping changes when the request is refreshed, and no more once it is not tracked any longer.
        """

    def refresh(self, request_id: str) -> Collection[str] | None:
        """Bring the overlaps of a tracked request up to date.

        Return the workers whose overlaps may have changed by that; None = any, and `overlaps` returns another mapping.
        """

    def stale(self) -> Collection[str]:
        """Return the tracked requests whose overlaps may have changed since. Do not keep it over a refresh."""

    def lookup(self, chain: Sequence[int]) -> Mapping[str, Overlap]:
        """Return the overlaps of a chain as of now, predictions included, with every block compared. Nothing of it is kept."""

    def verify(self, worker: str, chain: Sequence[int]) -> Overlap:
        """Return the overlap with every block compared, predictions included, for the decision that is about to be made."""


Blocks = Iterable[int]


# Interface of the index as this package builds it: a `PrefixIndex` that also has room for unconfirmed blocks.
#
# *Assumed* blocks are those a worker will hold soon, or is taken to hold because it sends no events. They count as `device`
# in a match, and for nothing else: `blocks`, `count` and `len` speak of what events said, so that a snapshot never holds a
# guess.

OnEvict = Callable[[list[int]], None]

PLANES: Final = 4  # the tiers in their order, then the assumed blocks
ASSUMED: Final = 3
ROUND: Final = 4  # blocks that a galloping match looks at before it decides where to look on
PLANE_OF: Final[dict[str, int]] = {"device": 0, "host": 1, "disk": 2}


class BlockTable(PrefixIndex, Protocol):
    """The index, pure or compiled. Both answer alike, but for the blocks that they evict.

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
