"""KV blocks that move beside the steps: to and from lower tiers, and on both sides of a hand-over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.workers.engine import Handover, Output, Sequence
from headrace.workers.errors import UnsupportedByEngine
from headrace.workers.sim.blocks import LOWER_TIERS
from headrace.workers.sim.decode_side import BlockLoad, DecodeTransfers, Loader
from headrace.workers.sim.fabric import HandoverWire
from headrace.workers.sim.prefill_side import PrefillTransfers
from headrace.workers.sim.run import EngineBatch, Phase, SequenceRun
from headrace.workers.sim.settings import TimingModel


class SimKvTransfer:
    """The KV transfers of one engine. Without a `wire` it hands nothing over; with `none` set there are no transfers at all.

    The engine's role decides which hand-overs may begin (`HandoverWire.side`); those begun in another role go on.
    """

    def __init__(
        self,
        batch: EngineBatch,
        timing: TimingModel,
        *,
        clock: Callable[[], float],
        wire: HandoverWire | None,
    ) -> None:
        self._batch = batch
        self._clock = clock
        self._wire = wire
        self.prefill_side = PrefillTransfers(wire) if wire is not None else None
        self.decode_side = DecodeTransfers(wire) if wire is not None else None
        comes = batch.manager.lower is not None or self.decode_side is not None
        self.loader = Loader(batch.manager, timing, clock=clock, decode_side=self.decode_side) if comes else None
        self.none = self.prefill_side is None and self.loader is None

    def poll(self) -> bool:
        """Poll the fabric for notices and ended transfers. Returns true if there were any; `settle` acts on them."""
        return self._wire is not None and self._wire.endpoint.poll()

    def poll_at(self) -> float | None:
        """Return the time of the next `poll`; None when none is needed."""
        if self._wire is None or self.prefill_side is None or self.decode_side is None:
            return None
        return self._wire.endpoint.poll_at(busy=self.prefill_side.busy or self.decode_side.busy)

    def next_at(self) -> float | None:
        """Return the time at which `settle` has something to do, unless `poll` finds something before."""
        times = [part.next_at() for part in (self.prefill_side, self.loader) if part is not None]
        return min([at for at in times if at is not None], default=None)

    def stats(self) -> dict[str, Any]:
        """Return counters; some tell what no real engine could know."""
        counts: dict[str, Any] = {}
        if self._batch.manager.lower is not None:
            counts["lower_blocks"] = self._batch.manager.lower.counts()
        if self.loader is not None:
            counts["loaded_blocks"] = dict(self.loader.loaded_blocks)
        if self.prefill_side is not None:
            counts |= {
                "handovers_held": self.prefill_side.holding,
                "handovers_expired": self.prefill_side.expired,
                **self.prefill_side.counts,
            }
        if self.decode_side is not None:
            counts |= self.decode_side.counts
        return counts

    # -- sequences come and go -------------------------------------------------------------------------------

    def enter(self, run: SequenceRun, wanted: Handover, sequence: Sequence) -> None:
        """Give a new sequence its part in a hand-over. Raises RequestInvalid or UnsupportedByEngine."""
        if self._wire is None or self.prefill_side is None or self.decode_side is None:
            raise UnsupportedByEngine(f"this simulator takes no hand-overs (disagg): it cannot be the {wanted.kind} side")
        side = self._wire.side(wanted, sequence, run.chain())
        if side.kind == "decode":
            self.decode_side.enter(run, side)
        elif side.room:
            self.prefill_side.enter(run, side.key)
        run.set_side(side)

    def leave(self, run: SequenceRun) -> None:
        """End the transfers that wait for, or belong to, a sequence that is over. It still holds its blocks."""
        if self.loader is not None:
            self.loader.cancel(run)
        if run.side is None or self.prefill_side is None or self.decode_side is None:
            return
        if run.side.kind == "decode":
            self.decode_side.forget(run, run.side)
        else:
            self.prefill_side.drop(run.side)

    def release(self, name: str, why: str) -> bool:
        """Release the blocks that a sequence that is over offers. Returns true if there were any."""
        return self.prefill_side is not None and self.prefill_side.release(name, why)

    # -- blocks come -----------------------------------------------------------------------------------------

    def begin(self, run: SequenceRun, load: BlockLoad, blocks: list[int]) -> bool:
        """Admit the first waiting sequence, with these blocks of prefix and that load. Returns False if there is no room."""
        loader, manager = self.loader, self._batch.manager
        fresh = manager.allocate(load.missing)
        if loader is None or fresh is None:
            manager.release(blocks)
            if loader is not None:
                loader.release(load)
            return False
        self._batch.start(run, blocks)
        run.phase = Phase.LOADING
        self._batch.loading.append(run)
        run.blocks = blocks + loader.begin(load, fresh)
        run.capacity = len(run.blocks) * manager.block_size
        return True

    def settle(self, drop: Callable[[SequenceRun], None]) -> list[Output]:
        """Handle arrivals and failures since the last step. Returns the last outputs of sequences that end with it."""
        self.poll()
        outputs = []
        for run, output in self.prefill_side.tick() if self.prefill_side is not None else ():
            if self._batch.runs.get(run.id) is run:
                drop(run)
                outputs.append(output)
        for load in self.loader.tick() if self.loader is not None else ():
            if load.fault is None:
                self._loaded(load.run, load)
            else:
                drop(load.run)
                outputs.append(Output(load.run.id, [], fault=load.fault))
        return outputs

    def _loaded(self, run: SequenceRun, load: BlockLoad) -> None:
        size, arrival = self._batch.manager.block_size, load.arrival
        own = load.local * size
        run.set_taint(load.taint)
        self._batch.reach(run, own)
        if arrival is not None and load.remote and not arrival.error:
            self._batch.reach(run, min(own + arrival.right * size, load.tokens))
            run.set_taint(run.taint or arrival.taint)
            self._batch.reach(run, load.tokens)
        if run.cached_tokens is None:
            run.cached_tokens = own
            tiers = {tier: load.found.count(tier) * size for tier in LOWER_TIERS if tier in load.found}
            run.extra = {"cached": {"device": own - sum(tiers.values()), **tiers}}
            if load.handed_over:
                run.extra["remote_tokens"] = run.computed - own
        self._batch.loading.remove(run)
        self._batch.prefill(run)

    # -- blocks go -------------------------------------------------------------------------------------------

    def hand_over(self, run: SequenceRun, output: Output, at: float) -> bool:
        """Offer the blocks of a sequence whose prompt is computed, and whose last output will be out at `at`.

        Returns true when it now waits for its room, and gives its output only then.
        """
        if self.prefill_side is None or run.side is None:
            return False
        if run.side.room:
            self._batch.decoding.remove(run)
            run.phase = Phase.PARKED
            self.prefill_side.park(run, output, run.side.key)
            return True
        if output.finish == "length":  # a prompt whose answer is over has nothing to hand over
            self.prefill_side.offer(run, output, at)
        return False
