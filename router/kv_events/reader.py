"""Cache events → the index: order, gaps, epochs, inventories. No I/O, no clock of its own.

The rules, per worker (design §5):

* `n` counts a worker's messages of one epoch without a hole. What is not newer than what was read is a repetition and ignored.
* A hole in `n`, or an epoch that does not begin with 0, means that events are missing.  What is known of the worker is dropped,
  because a block that was removed unseen would be believed in for ever, and its inventory is wanted.  What it stores from then
  on counts: it is all true, only not all there is.
* Stream sequences say nothing about holes.  Their only use is to skip what a snapshot has already.
* Parts of an inventory are gathered and applied together at the last one; one that breaks off is replaced by the next.
"""

from __future__ import annotations

from collections.abc import Generator

import structlog

from headrace.broker.codec import decode, unpack_u64_array
from headrace.broker.errors import MalformedMessage, UnsupportedVersion
from headrace.broker.messages import KvMessage, KvReset
from headrace.router.index.types import TIERS, CacheView, PrefixIndex, Tier
from headrace.router.kv_events import inventory as gathering_
from headrace.router.kv_events import metrics
from headrace.router.kv_events.applier import Applier, Blocks, UnusableBlocks, Work, unpack
from headrace.router.kv_events.inventory import NO_EPOCH, InventoryParts, Packed, WorkerSlice, WorkerState, parts_of
from headrace.router.kv_events.sources import KvEventSources

log = structlog.get_logger(__name__)


class KvEventReader(KvEventSources):
    """Applies the cache events of one pool. `index` must be the one inside `view`: snapshots are read from it."""

    def __init__(self, view: CacheView, index: PrefixIndex, *, pool: str = "") -> None:
        super().__init__(view, pool=pool)
        self.seq = 0  # everything up to this stream sequence is applied
        self.created = ""  # of the stream
        self.applied = 0  # messages read, for the one who makes snapshots
        self.reading = ""  # the worker whose blocks are being written down: its next message has to wait
        self.resets = 0
        self._applier = Applier(view, self._vanished)
        self._index = index

    @property
    def busy(self) -> str:
        """The worker whose change is half done, or nothing."""
        return self._applier.busy

    def _held_fast(self) -> tuple[str, ...]:
        return (self.busy, self.reading)

    def reset(self, now_s: float) -> None:
        """Nothing is known of anybody any more: the stream and the index have lost touch. Members stay members."""
        for worker, old in list(self._states.items()):
            if old.member:
                self._states[worker] = WorkerState(member=True, sends_events=old.sends_events, next_ask_s=now_s)
                if old.epoch != NO_EPOCH:
                    self._clear(worker, now_s)
            else:
                self._forget(worker)
        self.seq = 0
        self.resets += 1

    # events -----------------------------------------------------------------------------------------------------------------
    def receive(self, worker: str, seq: int, data: bytes, now_s: float) -> Work | None:
        """A message as it lies in the stream, on the subject of `worker`. Never raises for what is in it."""
        self._reached(seq)
        state = self._state(worker, now_s)
        if state is None or self._known(state, seq):
            return None
        try:
            message: KvMessage = decode(KvMessage, data)  # type: ignore[arg-type]  # mypy has no type for unions as values
        except UnsupportedVersion as error:
            # Whatever it says, we cannot follow this worker; an inventory would be of the same version.
            self._refuse(worker, "version", str(error), now_s)
            state.seq = seq
            self._lose(worker, state, "version", now_s)
            return None
        except MalformedMessage as error:
            self._suspect(worker, state, seq, "malformed", str(error), now_s)
            return None
        if message.worker != worker:
            self._suspect(worker, state, seq, "wrong_worker", f"says it is from {message.worker!r}", now_s)
            return None
        if message.epoch < 0 or message.n < 0:
            text = f"message {message.n} of epoch {message.epoch}: neither may be negative"
            self._suspect(worker, state, seq, "malformed", text, now_s)
            return None
        return self.apply(seq, message, now_s)

    def apply(self, seq: int, message: KvMessage, now_s: float) -> Work | None:
        """A decoded message. What it returns must be exhausted before the next one."""
        self._reached(seq)
        worker = message.worker
        state = self._state(worker, now_s)
        if state is None or self._known(state, seq):
            return None
        before = state.seq
        state.seq = seq
        self.applied += 1
        if not self._in_order(worker, state, message, now_s):
            return None
        try:
            if isinstance(message, KvReset):
                blocks = unpack(message.blocks)
                metrics.EVENTS.labels("reset").inc()
                metrics.BLOCKS.labels("reset").inc(sum(map(len, blocks.values())))
                return self._gather(state, message, blocks, max(before, seq - 1), now_s)
            removed, stored = unpack(message.removed), unpack(message.stored)
        except UnusableBlocks as error:
            self._refuse(worker, error.reason, str(error), now_s)
            self._lose(worker, state, error.reason, now_s)
            return None
        metrics.EVENTS.labels("step").inc()
        metrics.BLOCKS.labels("removed").inc(sum(map(len, removed.values())))
        metrics.BLOCKS.labels("stored").inc(sum(map(len, stored.values())))
        self._break_off(worker, state, "a step came between its parts", now_s)
        return self._applier.change(worker, cleared=message.cleared, removed=removed, stored=stored, now_s=now_s)

    def advance(self, seq: int) -> None:
        """There was nothing of this pool up to `seq`."""
        self._reached(seq)

    def _known(self, state: WorkerState, seq: int) -> bool:
        if seq > state.seq:
            return False
        metrics.REPEATED.labels("in_snapshot").inc()
        return True

    def _in_order(self, worker: str, state: WorkerState, message: KvMessage, now_s: float) -> bool:
        """False for a repetition. What is missing before this message is dealt with."""
        if message.epoch == state.epoch:
            if message.n <= state.n:
                metrics.REPEATED.labels("duplicate").inc()
                return False
            if message.n > state.n + 1:
                text = f"epoch {message.epoch}: {message.n} came after {state.n}"
                self._complaints.warn("kv.gap", now_s, pool=self.pool, worker=worker, missing=text)
                self._lose(worker, state, "gap", now_s)
        elif message.epoch == state.previous:
            metrics.REPEATED.labels("old_epoch").inc()
            return False
        else:
            known = state.epoch != NO_EPOCH
            state.sends_events = True
            if not known:
                self._view.add_worker(worker)
            state.previous, state.epoch = state.epoch, message.epoch
            if message.n == 0:
                self._break_off(worker, state, "its engine has started again", now_s)
                self._clear(worker, now_s)
                state.complete, state.wanted = True, False
            else:
                if known:
                    text = f"epoch {message.epoch} begins with {message.n}"
                    self._complaints.warn("kv.gap", now_s, pool=self.pool, worker=worker, missing=text)
                self._lose(worker, state, "epoch", now_s)
        state.n = message.n
        return True

    # inventories ------------------------------------------------------------------------------------------------------------
    def _gather(self, state: WorkerState, message: KvReset, blocks: Blocks, before: int, now_s: float) -> Work | None:
        worker, gathering = message.worker, state.gathering
        if message.part == 0:
            if gathering is not None:
                metrics.DUMPS.labels("superseded").inc()
            gathering = state.gathering = InventoryParts(
                message.dump, message.epoch, message.n - 1, before, complete=state.complete, at_s=now_s
            )
        elif gathering is None:
            metrics.DUMPS.labels("without_beginning").inc()
            return None  # the rest of one that was given up
        elif gathering.dump != message.dump or gathering.next_part != message.part:
            text = f"part {message.part} of {message.dump} came where part {gathering.next_part} of {gathering.dump} was due"
            self._break_off(worker, state, text, now_s)
            return None
        if not gathering.add(blocks, now_s) or self._gathered() > gathering_.MAX_GATHERED_BLOCKS:
            text = f"{gathering.size} blocks and not at its end; inventories under way have {self._gathered()} in all"
            self._refuse(worker, "too_large", text, now_s)
            self._break_off(worker, state, "too large", now_s)
            self._lose(worker, state, "too_large", now_s)
            return None
        if not message.last:
            return None
        state.gathering = None
        state.complete, state.wanted, state.asks = True, False, 0
        metrics.DUMPS.labels("applied").inc()
        log.info("kv.inventory", pool=self.pool, worker=worker, blocks=gathering.size, parts=gathering.next_part)
        self._count()
        return self._applier.replace(worker, gathering.blocks, now_s=now_s)

    def _gathered(self) -> int:
        return sum(state.gathering.size for state in self._states.values() if state.gathering is not None)

    def _break_off(self, worker: str, state: WorkerState, why: str, now_s: float) -> None:
        if state.gathering is None:
            return
        state.gathering = None
        self._want(state, now_s)
        metrics.DUMPS.labels("broken").inc()
        log.info("kv.inventory_broken", pool=self.pool, worker=worker, reason=why)

    # snapshots --------------------------------------------------------------------------------------------------------------
    def slice(self, worker: str) -> WorkerSlice | None:
        """All about one worker as of now. None when nothing is known of it (any more). Not while it is `busy`."""
        work = self.slicing(worker)
        while True:
            try:
                next(work)
            except StopIteration as end:
                piece: WorkerSlice | None = end.value
                return piece

    def slicing(self, worker: str) -> Generator[None, None, WorkerSlice | None]:
        """The same in steps of a few milliseconds. Until it is through, the worker is `reading` and gets no message.

        Raises RuntimeError when its blocks changed all the same (evicted, say): begin again.
        """
        state = self._states.get(worker)
        if state is None or state.epoch == NO_EPOCH:
            return None
        self.reading = worker
        try:
            blocks: dict[Tier, Packed] = {}
            for tier in TIERS:
                packed = bytearray()
                for some in parts_of(self._index, worker, tier):
                    packed += some
                    yield
                if packed:
                    blocks[tier] = packed
        finally:
            self.reading = ""
        before = state.gathering
        if before is not None:
            return WorkerSlice(worker, before.epoch, state.previous, before.n, before.seq, before.complete, blocks)
        return WorkerSlice(worker, state.epoch, state.previous, state.n, max(self.seq, state.seq), state.complete, blocks)

    def load(self, piece: WorkerSlice, now_s: float) -> Work:
        """Take a worker over from a snapshot: nothing may be known of it yet. Exhaust what it returns."""
        state = self._states.get(piece.worker)
        if state is None:
            state = self._states[piece.worker] = WorkerState(stranger_since_s=now_s)
            self._strangers += 1
        self._view.add_worker(piece.worker)
        state.epoch, state.previous, state.n, state.seq = piece.epoch, piece.previous, piece.n, piece.seq
        state.complete, state.wanted = piece.complete, not piece.complete
        stored = {tier: unpack_u64_array(data) for tier, data in piece.blocks.items()}
        return self._applier.in_slices(piece.worker, cleared=False, removed={}, stored=stored, now_s=now_s)

    def _clear(self, worker: str, now_s: float) -> None:
        self._applier.replace(worker, {}, now_s=now_s)

    def _vanished(self, worker: str) -> None:
        """Somebody else has dropped it from the view: begin again with its inventory."""
        log.warning("kv.worker_vanished", pool=self.pool, worker=worker)
        metrics.LOST.labels("vanished").inc()
        self._view.add_worker(worker)
        if (state := self._states.get(worker)) is not None:
            state.complete, state.wanted = False, True

    # what went wrong --------------------------------------------------------------------------------------------------------
    def _lose(self, worker: str, state: WorkerState, why: str, now_s: float) -> None:
        """Events are missing: drop its blocks, want its inventory."""
        metrics.LOST.labels(why).inc()
        self._break_off(worker, state, why, now_s)
        if state.epoch != NO_EPOCH:
            self._clear(worker, now_s)
        state.complete = False
        self._want(state, now_s)

    def _suspect(self, worker: str, state: WorkerState, seq: int, reason: str, text: str, now_s: float) -> None:
        """It cannot be told what this message changed, nor whether it was one of the worker's at all. If it was, its next one
        shows a hole; so as not to depend on there being a next one, ask for the inventory."""
        self._refuse(worker, reason, text, now_s)
        state.seq = seq
        self._want(state, now_s)

    def _reached(self, seq: int) -> None:
        if seq > self.seq:
            self.seq = seq
