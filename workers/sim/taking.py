"""The decode side of a hand-over: fetch the blocks of a prompt that another engine computed.

Nothing that is fetched can be trusted by its name: this side compares what arrived with what the prompt's blocks must hold, not
to refuse it (a real engine could not tell), but to answer as a model with a wrong cache would: wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workers.engine import Fault
from workers.sim.blocks import fingerprint
from workers.sim.fabric import Notice
from workers.sim.run import Run
from workers.sim.wire import Offer, Side, Wire, segments

_BEATS_PER_LEASE = 6


@dataclass(slots=True)
class _Fetch:
    run: Run
    side: Side
    first: int  # number of the first block fetched, within the prompt
    blocks: list[int]  # where to
    at: float  # when the blocks are read, or patience ends
    reads: bool  # by itself, at `at`
    over: bool = False  # written, refused or nothing to do
    error: str = ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A fetch ended. `right` of the blocks hold what they should; `taint` stands for what the rest holds instead."""

    run: Run
    right: int = 0
    taint: int = 0
    error: str = ""


class Taker:
    """All fetches of a decode engine."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._fetches: dict[str, _Fetch] = {}  # by sequence
        self._beats: dict[str, tuple[Offer, float]] = {}  # by sequence: leases to be renewed, and when
        self.stale = 0
        self.failed = 0
        self.fetched_blocks = 0

    def enter(self, run: Run, side: Side) -> None:
        """This sequence waits from now on: keep its lease alive."""
        if side.pulls and side.offer is not None:
            self._beats[run.id] = (side.offer, self._wire.clock())

    def skip(self, run: Run, side: Side) -> None:
        """All of the prompt that this sequence could fetch is here already."""
        self._beats.pop(run.id, None)
        self._tell(side, "fetched")

    def begin(self, run: Run, side: Side, first: int, blocks: list[int]) -> None:
        """Fetch the prompt's blocks from number `first` on into these."""
        wire, settings, now = self._wire, self._wire.settings, self._wire.clock()
        dead = run.has_fault("peer_dead") or not wire.fabric.reaches(side.peer)
        fetch = _Fetch(run, side, first, blocks, now + settings.handshake_timeout_s, False)
        self._fetches[run.id] = fetch
        if dead:
            fetch.error = f"engine {side.peer!r} did not answer within {settings.handshake_timeout_s:g} s"
        elif side.pulls and side.offer is not None:
            remote = side.offer.blocks[first : first + len(blocks)]
            fetch.reads = True
            fetch.at = wire.link.take(now, wire.transfer_s(len(blocks), segments(remote, blocks)))
        else:
            fetch.at = now + settings.room_timeout_s
            fetch.error = f"engine {side.peer!r} wrote nothing within {settings.room_timeout_s:g} s"
            self._tell(side, "register", tuple(blocks), first)

    def forget(self, run: Run, side: Side) -> None:
        """This sequence is gone: so may be what is kept for it."""
        self._fetches.pop(run.id, None)
        self._beats.pop(run.id, None)
        self._tell(side, "rejected")

    def decline(self, offer: Offer) -> bool:
        """Let the prefill side free blocks that nobody will fetch; whether it could be told."""
        notice = Notice(kind="rejected", key=offer.request, sender=self._wire.engine)
        return self._wire.fabric.notify(offer.engine, notice)

    def notice(self, notice: Notice) -> None:
        if notice.kind not in ("written", "refused"):
            return
        for fetch in self._fetches.values():
            if fetch.side.key == notice.key and not fetch.reads:
                fetch.over = True
                fetch.error = notice.reason

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self) -> list[Arrival]:
        """Renew leases that are due; the fetches that have ended."""
        now = self._wire.clock()
        for run, (offer, at) in list(self._beats.items()):
            if at <= now:
                self._wire.fabric.notify(offer.engine, Notice(kind="renew", key=offer.request, sender=self._wire.engine))
                self._beats[run] = (offer, now + offer.ttl_s / _BEATS_PER_LEASE)
        ended = [fetch for fetch in self._fetches.values() if fetch.over or fetch.at <= now]
        return [self._end(fetch) for fetch in ended]

    def next_at(self) -> float | None:
        """When `tick` has something to do."""
        due = [self._wire.clock() if fetch.over else fetch.at for fetch in self._fetches.values()]
        return min([*due, *(at for _, at in self._beats.values())], default=None)

    def _end(self, fetch: _Fetch) -> Arrival:
        side = fetch.side
        del self._fetches[fetch.run.id]
        self._beats.pop(fetch.run.id, None)
        cells: list[int] | None = None
        if fetch.run.has_fault("transfer_breaks"):
            fetch.error = fetch.error or f"the transfer from engine {side.peer!r} broke off"
        elif fetch.reads and side.offer is not None:
            cells = self._wire.fabric.read(side.peer, side.offer.blocks[fetch.first : fetch.first + len(fetch.blocks)])
            if cells is None:
                fetch.error = f"engine {side.peer!r} went away during the transfer"
        elif not fetch.error:
            cells = [self._wire.manager.cell(block) for block in fetch.blocks]
        if cells is None:
            self.failed += 1
            self._tell(side, "rejected")
            return Arrival(fetch.run, error=fetch.error)
        if fetch.reads:
            self._tell(side, "fetched")
        self.fetched_blocks += len(cells)
        return self._judge(fetch, cells)

    def _judge(self, fetch: _Fetch, cells: list[int]) -> Arrival:
        tokens = fetch.side.offer.tokens if fetch.side.offer is not None else len(fetch.run.ids)
        expected = fetch.run.cells(tokens)[fetch.first : fetch.first + len(cells)]
        right = next((n for n, (cell, want) in enumerate(zip(cells, expected, strict=True)) if cell != want), len(cells))
        if right == len(cells):
            return Arrival(fetch.run, right)
        self.stale += 1
        return Arrival(fetch.run, right, fingerprint(*cells[right:]))

    def fault(self, arrival: Arrival, side: Side) -> Fault | None:
        """What the sequence of a failed fetch ends with; None when it is to compute its prompt itself."""
        if not side.room and self._wire.settings.load_failure == "recompute":
            return None
        return Fault("transfer_failed", arrival.error, True)

    def _tell(
        self, side: Side, kind: Literal["register", "fetched", "rejected"], blocks: tuple[int, ...] = (), first: int = 0
    ) -> None:
        notice = Notice(kind=kind, key=side.key, sender=self._wire.engine, blocks=blocks, first=first)
        self._wire.fabric.notify(side.peer, notice)
