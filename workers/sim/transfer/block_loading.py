"""Loading of KV blocks from a tier below the device, or from the engine that prefilled the prompt.

A waiting sequence holds its slot and the blocks to be filled, and the batch goes on without it.  Blocks that were found are
loaded, the rest is computed.  Each tier is a link of its own that carries one load after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.workers.engine import Fault
from headrace.workers.sim.scheduling.blocks import BlockManager
from headrace.workers.sim.scheduling.run import SequenceRun
from headrace.workers.sim.scheduling.tiers import LOWER_TIERS, Content, LowerTier
from headrace.workers.sim.timing import TimingModel
from headrace.workers.sim.transfer.decode_side import Arrival, DecodeTransfers
from headrace.workers.sim.transfer.handover_state import PeerLink


@dataclass(slots=True)
class BlockLoad:
    """The blocks that a sequence loads after `have` blocks of the device's prefix cache.

    `found` are the blocks that follow: None is one more on the device, else the tier it is in. After them come
    `remote` blocks from another engine; with those, `tokens` are there.
    """

    run: SequenceRun
    have: int
    found: list[LowerTier | None] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)  # blocks of `found` that are on the device
    contents: list[Content] = field(default_factory=list)  # contents of the blocks of `found` that are in lower tiers
    remote: int = 0
    handed_over: bool = False  # handed over by another engine, even if nothing is to be fetched
    tokens: int = 0
    ready_at: float = 0.0
    arrival: Arrival | None = None  # arrival of the remote blocks
    fault: Fault | None = None

    @property
    def local(self) -> int:
        """Number of blocks that this engine had in some tier."""
        return self.have + len(self.found)

    @property
    def ended(self) -> bool:
        """True when no bytes are on their way."""
        return self.arrival is not None

    @property
    def taint(self) -> int:
        """The taint of the blocks that this engine had."""
        return self.run.taint or next((content.taint for content in self.contents if content.taint), 0)

    @property
    def missing(self) -> int:
        """Number of device blocks to be allocated."""
        return len(self.found) - self.found.count(None) + self.remote


class Loader:
    """The loads of one engine."""

    def __init__(
        self,
        manager: BlockManager,
        timing: TimingModel,
        *,
        clock: Callable[[], float],
        decode_side: DecodeTransfers | None = None,
    ) -> None:
        self._manager = manager
        self._timing = timing
        self._clock = clock
        self._decode_side = decode_side
        self._links: dict[LowerTier, PeerLink] = {"host": PeerLink(), "disk": PeerLink()}
        self.loads: dict[str, BlockLoad] = {}  # by sequence
        self.loaded_blocks: dict[str, int] = {"host": 0, "disk": 0}

    def plan(self, run: SequenceRun, have: int) -> BlockLoad | None:
        """Reserve what can be loaded for a sequence with this many blocks of prefix. Returns None when there is nothing.

        `begin` or `release` must follow.
        """
        size, lower = self._manager.block_size, self._manager.lower
        load = BlockLoad(run, have)
        if lower is not None:
            for value in run.chain()[have : (len(run.ids) - 1) // size]:
                tier = lower.find(value)
                if self._manager.has(value):
                    load.shared += self._manager.take_prefix([value])
                    load.found.append(None)
                elif tier is not None:
                    load.contents.append(lower.pin(tier, value))
                    load.found.append(tier)
                else:
                    break
        load.tokens = load.local * size
        side = run.side
        if side is None or side.kind != "decode":
            return load if load.found else None
        load.handed_over = True
        offered = side.offer.tokens if side.offer is not None else len(run.ids)
        load.tokens = max(load.tokens, min(offered, len(run.ids) - 1))
        load.remote = -(-load.tokens // size) - load.local
        return load

    def begin(self, load: BlockLoad, fresh: list[int]) -> list[int]:
        """Start a load with these `missing` newly allocated blocks. Returns all blocks after the first `have`, in order."""
        run, now = load.run, self._clock()
        self.loads[run.id] = load
        shared, empty = iter(load.shared), iter(fresh)
        blocks = [next(shared if tier is None else empty) for tier in load.found]
        load.ready_at = now
        for tier in LOWER_TIERS:
            count = load.found.count(tier)
            if count:
                self.loaded_blocks[tier] += count
                done = self._links[tier].reserve(now, self._timing.load_s(tier, count * self._manager.block_size))
                load.ready_at = max(load.ready_at, done)
        remote = list(empty)
        if run.side is None or self._decode_side is None:
            load.arrival = Arrival(run)
        elif not run.side.room and not remote:
            self._decode_side.skip(run, run.side)
            load.arrival, run.side = Arrival(run), run.side.then
        else:
            self._decode_side.begin(run, run.side, load.local, remote)
        return blocks + remote

    def release(self, load: BlockLoad) -> None:
        """Free what `plan` reserved, because there is no room for the load now."""
        self._manager.release(load.shared)
        self._unpin(load, moved=False)

    def tick(self) -> list[BlockLoad]:
        """Return the loads that have ended; `fault` is set where the sequence ends with it."""
        if self._decode_side is not None:
            for arrival in self._decode_side.tick():
                load, side = self.loads[arrival.run.id], arrival.run.side
                load.arrival, arrival.run.side = arrival, side.then if side is not None else None
                if arrival.error and side is not None:
                    load.fault = self._decode_side.fault(arrival, side)
        now = self._clock()
        ended = [load for load in self.loads.values() if load.fault or (load.ended and load.ready_at <= now)]
        for load in ended:
            del self.loads[load.run.id]
            self._unpin(load, moved=load.fault is None)
        return ended

    def cancel(self, run: SequenceRun) -> None:
        """Cancel the load of a sequence that has left. Blocks that were being copied stay in their tier."""
        load = self.loads.pop(run.id, None)
        if load is not None:
            self._unpin(load, moved=False)

    def _unpin(self, load: BlockLoad, *, moved: bool) -> None:
        lower = self._manager.lower
        if lower is None:
            return
        tiers = [tier for tier in load.found if tier is not None]
        for tier, content in zip(tiers, load.contents, strict=True):
            lower.unpin(tier, content.value, moved=moved)

    def next_at(self) -> float | None:
        """Return the time at which `tick` has something to do."""
        due = [load.ready_at for load in self.loads.values() if load.ended]
        later = self._decode_side.next_at() if self._decode_side is not None else None
        return min([*due, *([] if later is None else [later])], default=None)
