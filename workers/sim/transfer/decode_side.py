"""The decode side of a hand-over: fetch the blocks of a prompt that another engine computed.

Fetched content cannot be trusted by its name: this side compares it with what the prompt's blocks must hold, not to refuse it
(a real engine could not tell), but to answer wrongly, as a model with a wrong cache would.  Bytes with a wrong checksum are
another matter: they mean that the transfer failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.workers.engine import Fault
from headrace.workers.sim.scheduling.handover_side import KvOffer, Side
from headrace.workers.sim.scheduling.run import SequenceRun
from headrace.workers.sim.scheduling.tiers import fingerprint
from headrace.workers.sim.transfer.fabric import Notice, Transfer
from headrace.workers.sim.transfer.handover_state import HandoverWire, segments
from headrace.workers.sim.transfer.pinned_blocks import PING_S, PinnedBlocks

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
    """The fetches of a decode engine."""

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
        """True while blocks or answers may still arrive, or a lease must be renewed."""
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
        """Begin to move blocks if the other side can be reached by now."""
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
