"""What the index tells about a prompt on a worker, and what the rest of the router may ask of it.

All block names are chain values (`headrace.broker.blocks`), u64; a *chain* is the list of a prompt's values in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class Overlap(NamedTuple):
    """How many leading blocks of a chain a worker has: the longest prefix in `device`, then how far it goes on in device or
    host memory (`host`, in blocks beyond `device`), then on to disk as well (`disk`, beyond those)."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk


NO_OVERLAP = Overlap()


class PrefixIndex(Protocol):
    """Chain value → workers that hold the block, per tier."""

    def add_worker(self, worker: str) -> None:
        """Make it known, without blocks. Fine when it is known already (its blocks stay)."""

    def drop_worker(self, worker: str) -> None:
        """Forget it and its blocks. Fine when unknown."""

    def workers(self) -> Sequence[str]: ...

    def store(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        """Raises UnknownWorker."""

    def remove(self, worker: str, tier: Tier, blocks: Sequence[int]) -> None:
        """Blocks that it does not have are fine. Raises UnknownWorker."""

    def clear(self, worker: str) -> None:
        """It holds nothing any more. Raises UnknownWorker."""

    def match(self, chain: Sequence[int]) -> Mapping[str, Overlap]:
        """The workers that have at least the first block in some tier.

        May gallop: where a worker has two blocks of the chain it is trusted to have those between, for it cannot have computed
        the later one without them. Both sides of each end it reports were looked at: the worker has the last block and not the
        next. So for a worker that has lost a block in the middle and kept later ones the answer may be too long, never too
        short; `match_worker` tells.
        """

    def match_worker(self, worker: str, chain: Sequence[int]) -> Overlap:
        """The same for one worker, every block looked at. Raises UnknownWorker."""

    def blocks(self, worker: str, tier: Tier) -> bytes:
        """All its blocks of a tier as u64 little endian, in no order. Raises UnknownWorker."""

    def iter_blocks(self, worker: str, tier: Tier, size: int) -> Iterator[bytes]:
        """`blocks` in parts of at most `size`, some perhaps empty, each taken when it is asked for. Raises RuntimeError for the
        next part when events changed its blocks meanwhile; ValueError for a size below 1; UnknownWorker."""

    def count(self, worker: str) -> int:
        """Entries (block, tier) of a worker. Raises UnknownWorker."""

    def __len__(self) -> int:
        """Entries (block, worker, tier) in all."""


class CacheView(Protocol):
    """What the scheduler sees of all caches: blocks by events, blocks predicted from placements, and both matched with the
    requests that wait. `now_s` is any monotonic clock, the same for all calls."""

    def add_worker(self, worker: str, *, approximate: bool = False, capacity_blocks: int = 0) -> None:
        """`approximate`: it sends no events, its blocks are what was placed there, aged by TTL and capacity (0 = no limit).
        Calling it again changes the mode."""

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
        """One engine step: first cleared, then removed, then stored. Confirms predictions. Raises UnknownWorker."""

    def replace(self, worker: str, blocks: Mapping[Tier, Sequence[int]], *, now_s: float) -> None:
        """It holds exactly these. Raises UnknownWorker."""

    def predict(self, worker: str, blocks: Sequence[int], *, now_s: float) -> None:
        """A request with these blocks was placed there: they count as `device` at once, until they are confirmed or expire. Of
        an approximate worker they are its blocks. An unknown worker is fine (it is gone meanwhile)."""

    def expire(self, now_s: float) -> None:
        """Drop what was predicted and never confirmed, and aged blocks of approximate workers."""

    def track(self, request_id: str, chain: Sequence[int]) -> None:
        """A request begins to wait: its overlaps are kept current from now on."""

    def untrack(self, request_id: str) -> None:
        """Fine when unknown."""

    def overlaps(self, request_id: str) -> Mapping[str, Overlap]:
        """Of a tracked request, current: cached, and recomputed only for what has changed since."""

    def stale(self) -> Sequence[str]:
        """Tracked requests whose overlaps may have changed since they were last asked for."""

    def verify(self, worker: str, chain: Sequence[int]) -> Overlap:
        """Every block looked at, predictions included; for the decision that is about to be made."""


Blocks = Iterable[int]
