"""Cache events of a pool, applied to the view in order and in slices, so that other tasks get their turn in between."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import chain

import structlog

from headrace.broker.codec import decode, unpack_u64_array
from headrace.broker.errors import MalformedMessage, UnsupportedVersion
from headrace.broker.messages.events import KvMessage, KvReset
from headrace.router.errors import UnknownWorker
from headrace.router.index import inventory
from headrace.router.index import inventory as gathering_
from headrace.router.index.inventory import (
    MAX_STEP_BLOCKS,
    NO_EPOCH,
    InventoryParts,
    Packed,
    SourceState,
    WorkerSlice,
    parts_of,
)
from headrace.router.index.sources import KvEventSources
from headrace.router.index.types import TIERS, CacheView, PrefixIndex, Tier

SHARE_S = 0.01  # work at most this long before the rest of the process gets its turn

Work = Iterator[None]  # a large change to the index, of which each step applies one slice; exhaust it before the next message


async def run_sliced(work: Work) -> None:
    """Exhaust `work`, with a pause for other tasks after every `SHARE_S`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SHARE_S
    for _ in work:
        if loop.time() >= until:
            await asyncio.sleep(0)
            until = loop.time() + SHARE_S


SLICE_BLOCKS = 4096  # a few milliseconds

Blocks = Mapping[Tier, "array[int]"]  # arrays take no parameter at run time before Python 3.12


class UnusableBlocks(Exception):
    """A block list cannot be read. `reason` is a metric label."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Applier:
    """Applies changes to the view. `on_vanished` is called with a worker that another part has dropped from it."""

    def __init__(self, view: CacheView, on_vanished: Callable[[str], None]) -> None:
        self.busy = ""  # the worker whose change is half done
        self._view = view
        self._on_vanished = on_vanished

    def change(self, worker: str, *, cleared: bool, removed: Blocks, stored: Blocks, now_s: float) -> Work | None:
        if sum(map(len, chain(removed.values(), stored.values()))) > SLICE_BLOCKS:
            return self.in_slices(worker, cleared=cleared, removed=removed, stored=stored, now_s=now_s)
        try:
            self._view.apply(worker, cleared=cleared, removed=removed, stored=stored, now_s=now_s)
        except UnknownWorker:
            self._on_vanished(worker)
        return None

    def replace(self, worker: str, blocks: Blocks, *, now_s: float) -> Work | None:
        if sum(map(len, blocks.values())) > SLICE_BLOCKS:
            return self.in_slices(worker, cleared=True, removed={}, stored=blocks, now_s=now_s)
        try:
            self._view.replace(worker, blocks, now_s=now_s)
        except UnknownWorker:
            self._on_vanished(worker)
        return None

    def in_slices(self, worker: str, *, cleared: bool, removed: Blocks, stored: Blocks, now_s: float) -> Work:
        """Apply a change slice by slice. In between, the worker seems to hold less than it does, never more."""
        self.busy = worker
        try:
            if cleared:
                self._view.apply(worker, cleared=True, removed={}, stored={}, now_s=now_s)
                yield
            for some in _slices(removed):
                self._view.apply(worker, removed=some, stored={}, now_s=now_s)
                yield
            for some in _slices(stored):
                self._view.apply(worker, removed={}, stored=some, now_s=now_s)
                yield
        except UnknownWorker:
            self._on_vanished(worker)
        finally:
            self.busy = ""


def unpack(packed: Mapping[str, bytes]) -> dict[Tier, array[int]]:
    """Unpack the block lists of a message. Raises UnusableBlocks.

    Unknown tiers are counted and left out: a newer worker has them, and the router makes no use of blocks there.
    """
    blocks: dict[Tier, array[int]] = {}
    for name, data in packed.items():
        if len(data) > 8 * MAX_STEP_BLOCKS:
            raise UnusableBlocks("too_large", f"{len(data) // 8} blocks in one message, at most {MAX_STEP_BLOCKS} are read")
        if name not in TIERS:
            inventory.REFUSED.labels("unknown_tier").inc()
            continue
        try:
            blocks[name] = unpack_u64_array(data)
        except MalformedMessage as error:
            raise UnusableBlocks("misaligned", f"tier {name}: {error}") from None
    return blocks


def _slices(blocks: Blocks) -> Iterator[Blocks]:
    for tier, values in blocks.items():
        for start in range(0, len(values), SLICE_BLOCKS):
            yield {tier: values[start : start + SLICE_BLOCKS]}


# The reader of cache events, which brings the index up to date: order, gaps, epochs, inventories. No I/O, no clock of its
# own.
#
# The rules, per worker:
#
# * `n` counts a worker's messages of one epoch without a hole. A message that is not newer than the last one read is a
# repetition and ignored. * A hole in `n`, or an epoch that does not begin with 0, means that events are missing. The worker's
# blocks are dropped, because a block that was removed unseen would be believed in for ever, and its inventory is wanted.
# Blocks stored from then on count: they are there, only they are not all. * Stream sequences say nothing about holes. Their
# only use is to skip what a snapshot has already. * Parts of an inventory are gathered and applied together at the last one;
# one that breaks off is replaced by the next.

log = structlog.get_logger(__name__)


class KvEventReader:
    """Applies the cache events of one pool. `index` must be the one inside `view`: snapshots are read from it."""

    def __init__(self, view: CacheView, index: PrefixIndex, *, pool: str = "") -> None:
        self.pool = pool
        self.sources = KvEventSources(view, pool=pool)
        self.seq = 0  # everything up to this stream sequence is applied
        self.created = ""  # of the stream
        self.applied = 0  # messages read: the snapshotter counts by them
        self.reading = ""  # the worker whose blocks are being copied for a snapshot: its next message has to wait
        self.resets = 0
        self._applier = Applier(view, self._vanished)
        self._view = view
        self._index = index

    @property
    def busy(self) -> str:
        return self._applier.busy

    def expire(self, now_s: float) -> list[str]:
        """Drop strangers that did not become members in time, and return them. Call it every second or so."""
        return self.sources.expire(now_s, in_use=(self.busy, self.reading))

    def reset(self, now_s: float) -> None:
        """Forget all blocks and positions, because the index has lost touch with the stream. Members stay members."""
        for worker, old in self.sources.states():
            if old.member:
                self.sources.restart(worker, old, now_s)
                if old.epoch != NO_EPOCH:
                    self._clear(worker, now_s)
            else:
                self.sources.drop(worker)
        self.seq = 0
        self.resets += 1

    # Events.

    def receive(self, worker: str, seq: int, data: bytes, now_s: float) -> Work | None:
        """Apply a message of the stream, stored on the subject of `worker`. Never raises for its content.

        Exhaust the returned work before the next message.
        """
        self._reached(seq)
        state = self.sources.state_of(worker, now_s)
        if state is None or self._repeated(state, seq):
            return None
        try:
            message: KvMessage = decode(KvMessage, data)  # type: ignore[arg-type]  # mypy has no type for unions as values
        except UnsupportedVersion as error:
            # Whatever it says, we cannot follow this worker; an inventory would be of the same version.
            self.sources.refuse(worker, "version", str(error), now_s)
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
        """Apply a decoded message. Exhaust the returned work before the next one."""
        self._reached(seq)
        worker = message.worker
        state = self.sources.state_of(worker, now_s)
        if state is None or self._repeated(state, seq):
            return None
        before = state.seq
        state.seq = seq
        self.applied += 1
        if not self._in_order(worker, state, message, now_s):
            return None
        try:
            if isinstance(message, KvReset):
                blocks = unpack(message.blocks)
                inventory.events("reset").inc()
                inventory.blocks("reset").inc(sum(map(len, blocks.values())))
                return self._gather(state, message, blocks, max(before, seq - 1), now_s)
            removed, stored = unpack(message.removed), unpack(message.stored)
        except UnusableBlocks as error:
            self.sources.refuse(worker, error.reason, str(error), now_s)
            self._lose(worker, state, error.reason, now_s)
            return None
        inventory.events("step").inc()
        if removed:
            inventory.blocks("removed").inc(sum(map(len, removed.values())))
        if stored:
            inventory.blocks("stored").inc(sum(map(len, stored.values())))
        self._break_off(worker, state, "a step came between its parts", now_s)
        return self._applier.change(worker, cleared=message.cleared, removed=removed, stored=stored, now_s=now_s)

    def advance(self, seq: int) -> None:
        """Note that the stream has no further message of this pool up to `seq`."""
        self._reached(seq)

    def _repeated(self, state: SourceState, seq: int) -> bool:
        if seq > state.seq:
            return False
        inventory.REPEATED.labels("in_snapshot").inc()
        return True

    def _in_order(self, worker: str, state: SourceState, message: KvMessage, now_s: float) -> bool:
        """Return False for a repetition. If messages before this one are missing, drop the worker's blocks first."""
        if message.epoch == state.epoch:
            if message.n <= state.n:
                inventory.REPEATED.labels("duplicate").inc()
                return False
            if message.n > state.n + 1:
                text = f"epoch {message.epoch}: {message.n} came after {state.n}"
                self.sources.warn_gap(worker, text, now_s)
                self._lose(worker, state, "gap", now_s)
        elif message.epoch == state.previous:
            inventory.REPEATED.labels("old_epoch").inc()
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
                    self.sources.warn_gap(worker, text, now_s)
                self._lose(worker, state, "epoch", now_s)
        state.n = message.n
        return True

    # Inventories.

    def _gather(self, state: SourceState, message: KvReset, blocks: Blocks, before: int, now_s: float) -> Work | None:
        worker, gathering = message.worker, state.gathering
        if message.part == 0:
            if gathering is not None:
                inventory.DUMPS.labels("superseded").inc()
            gathering = state.gathering = InventoryParts(
                message.dump, message.epoch, message.n - 1, before, complete=state.complete, at_s=now_s
            )
        elif gathering is None:
            inventory.DUMPS.labels("without_beginning").inc()
            return None  # the rest of one that was given up
        elif gathering.dump != message.dump or gathering.next_part != message.part:
            text = f"part {message.part} of {message.dump} came where part {gathering.next_part} of {gathering.dump} was due"
            self._break_off(worker, state, text, now_s)
            return None
        if not gathering.add(blocks, now_s) or self.sources.gathered_blocks() > gathering_.MAX_GATHERED_BLOCKS:
            in_all = self.sources.gathered_blocks()
            text = f"{gathering.size} blocks and not at its end; inventories under way have {in_all} in all"
            self.sources.refuse(worker, "too_large", text, now_s)
            self._break_off(worker, state, "too large", now_s)
            self._lose(worker, state, "too_large", now_s)
            return None
        if not message.last:
            return None
        state.gathering = None
        state.complete, state.wanted, state.asks = True, False, 0
        inventory.DUMPS.labels("applied").inc()
        log.info("kv.inventory", pool=self.pool, worker=worker, blocks=gathering.size, parts=gathering.next_part)
        self.sources.count()
        return self._applier.replace(worker, gathering.blocks, now_s=now_s)

    def _break_off(self, worker: str, state: SourceState, why: str, now_s: float) -> None:
        if state.gathering is None:
            return
        state.gathering = None
        self.sources.want_inventory(state, now_s)
        inventory.DUMPS.labels("broken").inc()
        log.info("kv.inventory_broken", pool=self.pool, worker=worker, reason=why)

    # Snapshots.

    def slice(self, worker: str) -> WorkerSlice | None:
        """Return the part of a snapshot for one worker; None if nothing was read of it. Not while the worker is `busy`."""
        work = self.slicing(worker)
        while True:
            try:
                next(work)
            except StopIteration as end:
                piece: WorkerSlice | None = end.value
                return piece

    def slicing(self, worker: str) -> Generator[None, None, WorkerSlice | None]:
        state = self.sources.get(worker)
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
        """Load a worker from a snapshot, of which nothing has been read yet. Exhaust the returned work."""
        state = self.sources.admit(piece.worker, now_s)
        self._view.add_worker(piece.worker)
        state.epoch, state.previous, state.n, state.seq = piece.epoch, piece.previous, piece.n, piece.seq
        state.complete, state.wanted = piece.complete, not piece.complete
        stored = {tier: unpack_u64_array(data) for tier, data in piece.blocks.items()}
        return self._applier.in_slices(piece.worker, cleared=False, removed={}, stored=stored, now_s=now_s)

    def _clear(self, worker: str, now_s: float) -> None:
        self._applier.replace(worker, {}, now_s=now_s)

    def _vanished(self, worker: str) -> None:
        """Begin again with the inventory of a worker that was dropped from the view by another part of the router."""
        log.warning("kv.worker_vanished", pool=self.pool, worker=worker)
        inventory.LOST.labels("vanished").inc()
        self._view.add_worker(worker)
        if (state := self.sources.get(worker)) is not None:
            state.complete, state.wanted = False, True

    # Losses.

    def _lose(self, worker: str, state: SourceState, why: str, now_s: float) -> None:
        """Drop the worker's blocks and want its inventory, because events are missing."""
        inventory.LOST.labels(why).inc()
        self._break_off(worker, state, why, now_s)
        if state.epoch != NO_EPOCH:
            self._clear(worker, now_s)
        state.complete = False
        self.sources.want_inventory(state, now_s)

    def _suspect(self, worker: str, state: SourceState, seq: int, reason: str, text: str, now_s: float) -> None:
        """Want the worker's inventory after a message that cannot be read.

        Such a message may have changed anything, and may not be the worker's at all.  If it was, the next one shows a hole; the
        inventory is wanted at once, because there may be no next one.
        """
        self.sources.refuse(worker, reason, text, now_s)
        state.seq = seq
        self.sources.want_inventory(state, now_s)

    def _reached(self, seq: int) -> None:
        if seq > self.seq:
            self.seq = seq
