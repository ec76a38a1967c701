"""Blocks that a decode engine no longer needs but that may still be written to.

Reading and writing are one-sided: to give such a block to another sequence would let the late bytes of one prompt run into
another.  They stay held until the other side has answered or is gone, or the transfer has settled, for a bounded time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import structlog

from headrace.workers.engine import Fault
from headrace.workers.sim.blocks import LOWER_TIERS, BlockManager, Content, LowerTier, fingerprint
from headrace.workers.sim.fabric import HandoverWire, Notice, PeerLink, Transfer, segments
from headrace.workers.sim.run import KvOffer, SequenceRun, Side
from headrace.workers.sim.settings import TimingModel

PING_S = 0.5  # interval of the liveness checks of an engine that may write here

_log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Pin:
    blocks: list[int]
    until: float
    ticket: int = 0
    peer: str = ""
    transfer: Transfer | None = None
    ping_at: float = 0.0


class PinnedBlocks:
    def __init__(self, wire: HandoverWire) -> None:
        self._wire = wire
        self.pins: list[_Pin] = []

    def until_settled(self, blocks: list[int], transfer: Transfer) -> None:
        """Pin the target of an own read."""
        self._keep(_Pin(blocks, self._until(), transfer=transfer))

    def until_answered(self, blocks: list[int], ticket: int, peer: str) -> None:
        """Pin the blocks that a peer was asked to write to."""
        if self._wire.endpoint.reaches(peer):
            self._keep(_Pin(blocks, self._until(), ticket, peer, ping_at=self._wire.clock() + PING_S))

    def _until(self) -> float:
        settings = self._wire.settings
        return self._wire.clock() + settings.transfer_timeout_s + settings.room_timeout_s

    def _keep(self, pin: _Pin) -> None:
        self._wire.manager.keep(pin.blocks)
        self.pins.append(pin)

    def answered(self, ticket: int) -> None:
        """Unpin the blocks of this ticket: the peer writes to them no more."""
        self._release([pin for pin in self.pins if pin.transfer is None and pin.ticket == ticket])

    def tick(self) -> None:
        """Unpin blocks that can no longer be written to."""
        now = self._wire.clock()
        for pin in self.pins:
            if pin.until <= now:
                _log.warning("blocks.unanswered", engine=self._wire.engine, peer=pin.peer, blocks=len(pin.blocks))
        self._release([pin for pin in self.pins if pin.until <= now or self._is_over(pin, now)])

    def _is_over(self, pin: _Pin, now: float) -> bool:
        if pin.transfer is not None:
            return pin.transfer.settled
        endpoint = self._wire.endpoint
        if pin.ping_at <= now:
            pin.ping_at = now + PING_S
            endpoint.notify(pin.peer, Notice(kind="renew", key="", sender=endpoint.engine))
        return not endpoint.reaches(pin.peer)

    def _release(self, over: list[_Pin]) -> None:
        for pin in over:
            self.pins.remove(pin)
            self._wire.manager.release(pin.blocks)

    def next_at(self) -> float | None:
        """Return the time at which `tick` has something to do, unless the endpoint has something before."""
        return min((pin.until if pin.transfer is not None else min(pin.until, pin.ping_at) for pin in self.pins), default=None)


# The decode side of a hand-over: fetch the blocks of a prompt that another engine computed.
#
# Fetched content cannot be trusted by its name: this side compares it with what the prompt's blocks must hold, not to refuse
# it (a real engine could not tell), but to answer wrongly, as a model with a wrong cache would. Bytes with a wrong checksum
# are another matter: they mean that the transfer failed.

_RENEWALS_PER_LEASE = 6


@dataclass(slots=True)
class _Fetch:
    run: SequenceRun
    side: Side
    first: int  # number of the first block fetched, within the prompt
    blocks: list[int]  # target blocks of this engine
    began: float
    until: float  # deadline
    begun: bool = False  # the other side was reached
    at: float = 0.0  # pulled: when the blocks are there, as modelled
    transfer: Transfer | None = None  # pulled
    ticket: int = 0  # pushed
    answered: bool = False  # pushed: written or refused
    error: str = ""
    stalls: bool = False  # injected
    ping_at: float = 0.0

    def is_over(self, now: float) -> bool:
        if self.until <= now or (self.error and self.begun):
            return True
        if self.stalls or not self.begun:
            return False
        if self.transfer is None:
            return self.answered
        return self.transfer.failed or (self.transfer.ended and self.at <= now)

    @property
    def due(self) -> float:
        """The time at which the fetch may be over, unless the endpoint has something before."""
        if self.stalls or self.transfer is None or not self.transfer.ended:
            return self.until
        return min(self.at, self.until)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The end of a fetch. `right` of the blocks hold what they should; `taint` stands for what the rest holds instead."""

    run: SequenceRun
    right: int = 0
    taint: int = 0
    error: str = ""


class DecodeTransfers:
    def __init__(self, wire: HandoverWire) -> None:
        self._wire = wire
        self._fetches: dict[str, _Fetch] = {}  # by sequence
        self._renewals: dict[str, tuple[KvOffer, float]] = {}  # by sequence: leases to be renewed, and when
        self._pinned = PinnedBlocks(wire)
        self._ticket = 0
        self.counts: dict[str, float] = {
            "fetched_blocks": 0,
            "failed_fetches": 0,
            "stale_fetches": 0,
            "broken_fetches": 0,
            "fetch_s": 0.0,
        }

    @property
    def busy(self) -> bool:
        return bool(self._fetches or self._renewals or self._pinned.pins)

    def enter(self, run: SequenceRun, side: Side) -> None:
        """Keep the lease of a waiting sequence alive from now on."""
        if side.offer is not None:
            self._renewals[run.id] = (side.offer, self._wire.clock())

    def skip(self, run: SequenceRun, side: Side) -> None:
        """End a hand-over without a fetch, because all of the prompt's blocks are here already."""
        self._renewals.pop(run.id, None)
        self._notify(side, "fetched")

    def begin(self, run: SequenceRun, side: Side, first: int, blocks: list[int]) -> None:
        """Fetch the prompt's blocks from number `first` on into these."""
        now = self._wire.clock()
        until = now + self._wire.settings.handshake_timeout_s
        fetch = _Fetch(run, side, first, blocks, now, until, stalls=run.has_fault("stall_transfer"))
        self._fetches[run.id] = fetch
        self._reach(fetch)

    def _reach(self, fetch: _Fetch) -> None:
        wire, settings, now, side = self._wire, self._wire.settings, self._wire.clock(), fetch.side
        if fetch.run.has_fault("peer_dead") or not wire.endpoint.reaches(side.peer):
            return
        fetch.begun = True
        if side.pulls and side.offer is not None:
            remote = side.offer.blocks[fetch.first : fetch.first + len(fetch.blocks)]
            fetch.until = now + settings.transfer_timeout_s
            fetch.at = wire.link.reserve(now, wire.transfer_s(len(remote), segments(remote, fetch.blocks)))
            if not fetch.stalls:
                fetch.transfer = wire.endpoint.read(side.peer, remote, fetch.blocks)
            return
        fetch.until = now + (settings.room_timeout_s if side.room else settings.transfer_timeout_s)
        fetch.ping_at = now + PING_S
        self._ticket += 1
        fetch.ticket = self._ticket
        if not self._notify(side, "register", fetch):
            fetch.error = f"engine {side.peer!r} went away"

    def forget(self, run: SequenceRun, side: Side) -> None:
        """Drop a sequence that has left, and tell the other side to release its blocks. Called while it still holds its own."""
        fetch = self._fetches.pop(run.id, None)
        self._renewals.pop(run.id, None)
        if fetch is not None:
            self._pin(fetch)
        self._notify(side, "rejected")

    def _pin(self, fetch: _Fetch) -> None:
        """Pin the blocks of a dropped fetch while the other side, or the transfer, may still write to them."""
        if fetch.transfer is not None and not fetch.transfer.settled:
            self._pinned.until_settled(fetch.blocks, fetch.transfer)
        elif fetch.ticket and not fetch.answered:
            self._pinned.until_answered(fetch.blocks, fetch.ticket, fetch.side.peer)

    def decline(self, offer: KvOffer) -> bool:
        """Tell the prefill side to free blocks that will not be fetched. Returns true if it could be told."""
        notice = Notice(kind="rejected", key=offer.request, number=offer.number, sender=self._wire.engine)
        return self._wire.endpoint.notify(offer.engine, notice)

    def notice(self, notice: Notice) -> None:
        if notice.kind not in ("written", "refused"):
            return
        self._pinned.answered(notice.ticket)
        for fetch in self._fetches.values():
            if fetch.ticket == notice.ticket:
                fetch.answered = True
                fetch.error = notice.reason

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self) -> list[Arrival]:
        """Renew leases that are due. Returns the fetches that have ended."""
        now = self._wire.clock()
        for run, (offer, at) in list(self._renewals.items()):
            if at <= now:
                self._renew(offer.engine, offer.request, offer.number)
                self._renewals[run] = (offer, now + offer.ttl_s / _RENEWALS_PER_LEASE)
        for fetch in self._fetches.values():
            if not fetch.begun:
                self._reach(fetch)
            elif fetch.ticket and not fetch.answered and fetch.ping_at <= now:
                fetch.ping_at = now + PING_S
                if not self._renew(fetch.side.peer, fetch.side.key, fetch.side.number):
                    fetch.error = f"engine {fetch.side.peer!r} went away"
        self._pinned.tick()
        return [self._end(fetch) for fetch in list(self._fetches.values()) if fetch.is_over(now)]

    def next_at(self) -> float | None:
        """Return the time at which `tick` has something to do, unless the endpoint has something before."""
        now = self._wire.clock()
        due = [now if fetch.is_over(now) else fetch.due for fetch in self._fetches.values()]
        due += [fetch.ping_at for fetch in self._fetches.values() if fetch.ticket and not fetch.answered]
        due += [at for _, at in self._renewals.values()]
        if (pins := self._pinned.next_at()) is not None:
            due.append(pins)
        return min(due, default=None)

    def _end(self, fetch: _Fetch) -> Arrival:
        side, now = fetch.side, self._wire.clock()
        del self._fetches[fetch.run.id]
        self._renewals.pop(fetch.run.id, None)
        error = self._outcome(fetch, now)
        cells = self._wire.endpoint.content(fetch.blocks) if not error else None
        if not error and cells is None:
            self.counts["broken_fetches"] += 1
            error = f"blocks of engine {side.peer!r} arrived broken"
        if cells is None:
            self.counts["failed_fetches"] += 1
            self._pin(fetch)
            self._notify(side, "rejected")
            return Arrival(fetch.run, error=error)
        if side.pulls:
            self._notify(side, "fetched")
        self.counts["fetched_blocks"] += len(cells)
        self.counts["fetch_s"] += now - fetch.began
        return self._compare(fetch, cells)

    def _outcome(self, fetch: _Fetch, now: float) -> str:
        """Return an empty text, or the reason why the blocks cannot have come."""
        settings, peer = self._wire.settings, fetch.side.peer
        if fetch.error:
            return fetch.error
        if not fetch.begun:
            return f"engine {peer!r} did not answer within {settings.handshake_timeout_s:g} s"
        if fetch.run.has_fault("transfer_breaks"):
            return f"the transfer from engine {peer!r} broke off"
        if fetch.transfer is not None and fetch.transfer.ended and (fetch.transfer.failed or fetch.at <= now):
            error = fetch.transfer.finish()
            return f"engine {peer!r}: {error}" if error else ""
        if fetch.answered and not fetch.stalls:
            return ""
        return f"nothing came from engine {peer!r} within {fetch.until - fetch.began:g} s"

    def _compare(self, fetch: _Fetch, cells: list[int]) -> Arrival:
        tokens = fetch.side.offer.tokens if fetch.side.offer is not None else len(fetch.run.ids)
        expected = fetch.run.cells(tokens)[fetch.first : fetch.first + len(cells)]
        right = next((n for n, (cell, want) in enumerate(zip(cells, expected, strict=True)) if cell != want), len(cells))
        if right == len(cells):
            return Arrival(fetch.run, right)
        self.counts["stale_fetches"] += 1
        return Arrival(fetch.run, right, fingerprint(*cells[right:]))

    def fault(self, arrival: Arrival, side: Side) -> Fault | None:
        """Return the fault that ends the sequence of a failed fetch; None when it is to compute its prompt itself."""
        if not side.room and self._wire.settings.load_failure == "recompute":
            return None
        return Fault("transfer_failed", arrival.error, True)

    def _renew(self, peer: str, key: str, number: int) -> bool:
        return self._wire.endpoint.notify(peer, Notice(kind="renew", key=key, number=number, sender=self._wire.engine))

    def _notify(self, side: Side, kind: Literal["register", "fetched", "rejected"], fetch: _Fetch | None = None) -> bool:
        notice = Notice(
            kind=kind,
            key=side.key,
            number=side.number,
            sender=self._wire.engine,
            ticket=fetch.ticket if fetch is not None else 0,
            blocks=tuple(fetch.blocks) if fetch is not None else (),
            first=fetch.first if fetch is not None else 0,
        )
        return self._wire.endpoint.notify(side.peer, notice)


# Loading of KV blocks from a tier below the device, or from the engine that prefilled the prompt.
#
# A waiting sequence holds its slot and the blocks to be filled, and the batch goes on without it. Blocks that were found are
# loaded, the rest is computed. Each tier is a link of its own that carries one load after the other.


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
