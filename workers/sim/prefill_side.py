"""Writes of a prefill side into the memory of a decode side that asked for them.

Every ask is answered once: "written", or "refused" when no more bytes will come.  Until then the asking side keeps its blocks,
for they may be written to at any moment; so a write that is cancelled is answered when it has settled.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from headrace.workers.engine import Fault, Output
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.fabric import HandoverWire, Notice, Transfer, segments
from headrace.workers.sim.run import KvOffer, SequenceRun, Side


@dataclass(frozen=True, slots=True)
class Ask:
    """The blocks of a decode side that are to be written to, for the prompt's blocks from number `first` on."""

    engine: str
    ticket: int
    blocks: tuple[int, ...]
    first: int
    until: float


@dataclass(slots=True)
class Write:
    ask: Ask
    blocks: list[int]  # blocks of this engine
    began: float
    done_at: float  # as modelled
    until: float
    transfer: Transfer | None  # None: stalled

    @property
    def due(self) -> float:
        """The time at which the write is over, if the real transfer has ended by then."""
        return min(self.done_at, self.until) if self.transfer is not None and self.transfer.ended else self.until


@dataclass(frozen=True, slots=True)
class _Cancelled:
    key: str
    ask: Ask
    blocks: list[int]
    transfer: Transfer
    why: str


class BlockWriter:
    def __init__(self, wire: HandoverWire) -> None:
        self._wire = wire
        self.closing: list[_Cancelled] = []
        self.counts: dict[str, float] = {"written_blocks": 0, "failed_writes": 0, "write_s": 0.0}

    def begin(self, ask: Ask, blocks: list[int], *, stalls: bool) -> Write:
        """Write the part of these blocks that the ask names."""
        wire, now = self._wire, self._wire.clock()
        given = blocks[ask.first : ask.first + len(ask.blocks)]
        taken = ask.blocks[: len(given)]
        done_at = wire.link.reserve(now, wire.transfer_s(len(given), segments(given, taken)))
        transfer = None if stalls else wire.endpoint.write(ask.engine, given, taken)
        return Write(ask, given, now, done_at, now + wire.settings.transfer_timeout_s, transfer)

    def is_over(self, write: Write, now: float) -> bool:
        transfer = write.transfer
        return write.until <= now or (transfer is not None and (transfer.failed or (transfer.ended and write.done_at <= now)))

    def end(self, key: str, write: Write) -> str:
        """End a write and tell the other side. Returns an empty text, or why it failed."""
        wire, ask, transfer, now = self._wire, write.ask, write.transfer, self._wire.clock()
        if transfer is not None and transfer.ended and (transfer.failed or write.done_at <= now):
            error = transfer.finish()
        else:
            error = f"nothing was written within {wire.settings.transfer_timeout_s:g} s"
        if not error:
            there = wire.endpoint.notify(ask.engine, Notice(kind="written", key=key, sender=wire.engine, ticket=ask.ticket))
            error = "" if there else "it went away after the transfer"
        if error:
            self.counts["failed_writes"] += 1
            error = f"engine {ask.engine!r}: {error}"
            self.cancel(key, write, error)
        else:
            self.counts["written_blocks"] += len(write.blocks)
            self.counts["write_s"] += now - write.began
        return error

    def cancel(self, key: str, write: Write, why: str) -> None:
        """Cancel a write. Its blocks are held until the transfer has settled."""
        if write.transfer is None or write.transfer.settled:
            self.refuse(key, write.ask, why)
            return
        self._wire.manager.keep(write.blocks)
        self.closing.append(_Cancelled(key, write.ask, write.blocks, write.transfer, why))

    def refuse(self, key: str, ask: Ask, why: str) -> None:
        """Refuse an ask: no bytes will come for it."""
        notice = Notice(kind="refused", key=key, sender=self._wire.engine, ticket=ask.ticket, reason=why)
        self._wire.endpoint.notify(ask.engine, notice)

    def tick(self) -> None:
        """Refuse the asks of cancelled writes that have settled."""
        if not self.closing:
            return
        settled = [item for item in self.closing if item.transfer.settled]
        self.closing = [item for item in self.closing if not item.transfer.settled]
        for item in settled:
            self._wire.manager.release(item.blocks)
            self.refuse(item.key, item.ask, item.why)


# The prefill side of a hand-over: an engine that has computed a prompt keeps its blocks until they are fetched.
#
# Blocks on offer are released when the other side has them, when it or the caller declines, or when the lease ends; the end
# of a lease is silent. In the pull mode the other side reads by itself. In the push mode and in rooms it registers its
# prepared blocks, and this side writes (`block_writer.py`); the side that comes first waits for the other, for a bounded
# time.

_MOST_ENDED = 4096  # ended hand-overs remembered, so that a late other side need not wait
_MOST_ASKS = 4096  # asks that wait for their blocks


@dataclass(slots=True)
class _Hold:
    """Blocks kept for the other side. In a room the sequence still owns them, and ends with `output`."""

    key: str
    blocks: list[int]
    until: float
    number: int = 0  # number of the offer; 0 in a room
    run: SequenceRun | None = None
    output: Output | None = None
    write: Write | None = None
    stalls: bool = False  # injected


class PrefillTransfers:
    def __init__(self, wire: HandoverWire) -> None:
        self._wire = wire
        self._writer = BlockWriter(wire)
        self._room_runs: dict[str, SequenceRun] = {}  # sequences that will end in a room
        self._holds: dict[str, _Hold] = {}
        self._asks: dict[str, Ask] = {}  # asks that came before their blocks
        self._ended_keys: OrderedDict[str, None] = OrderedDict()
        self._ended: list[tuple[SequenceRun, Output]] = []
        self._number = 0
        self.expired = 0

    @property
    def holding(self) -> int:
        """Number of hand-overs whose blocks are kept."""
        return len(self._holds)

    @property
    def busy(self) -> bool:
        """True while notices may arrive for a hand-over, or a write is under way."""
        return bool(self._holds or self._room_runs or self._asks or self._writer.closing)

    @property
    def counts(self) -> dict[str, float]:
        """Counters of the writes, and their time."""
        return self._writer.counts

    def enter(self, run: SequenceRun, key: str) -> None:
        """Take in a sequence that is to end in this room. Raises RequestInvalid when another sequence is in it."""
        if key in self._room_runs:
            raise RequestInvalid(f"{key} is taken by sequence {self._room_runs[key].id!r}", param="handover")
        self._room_runs[key] = run
        if key in self._ended_keys:
            self._give_up(run, "the decode side is gone")

    def offer(self, run: SequenceRun, output: Output, at: float) -> None:
        """Keep this sequence's blocks from now on, and put into its last output how to fetch them, valid from `at`."""
        wire, settings = self._wire, self._wire.settings
        tokens = len(run.ids) - 1
        blocks = run.blocks[: -(-tokens // settings.block_size)]
        wire.manager.release(run.blocks[len(blocks) :])
        self._stamp(run, blocks, tokens)
        run.blocks = []
        self._number += 1
        wall = at + wire.wall_offset_s
        offer = KvOffer(
            engine=wire.engine,
            request=run.id,
            number=self._number,
            blocks=blocks,
            tokens=tokens,
            chain=run.chain()[: tokens // settings.block_size],
            layout=wire.layout,
            mode=settings.transfer_mode,
            cached_tokens=run.cached_tokens or 0,
            issued_at=wall,
            ttl_s=settings.lease_s,
            expires_at=wall + settings.lease_s,
        )
        output.handover = msgspec.to_builtins(offer)
        self._hold(_Hold(run.id, blocks, at + settings.lease_s, self._number, stalls=run.has_fault("stall_transfer")))

    def park(self, run: SequenceRun, output: Output, key: str) -> None:
        """Keep a sequence that waits only for the hand-over in its room; `output` is its last one."""
        tokens = len(run.ids) - 1
        blocks = run.blocks[: -(-tokens // self._wire.settings.block_size)]
        self._stamp(run, blocks, tokens)
        until = self._wire.clock() + self._wire.settings.room_timeout_s
        self._hold(_Hold(key, blocks, until, run=run, output=output, stalls=run.has_fault("stall_transfer")))

    def _stamp(self, run: SequenceRun, blocks: list[int], tokens: int) -> None:
        manager = self._wire.manager
        for block, cell in zip(blocks, run.cells(tokens), strict=True):
            manager.set_cell(block, cell)
        self._wire.endpoint.stamp(blocks, [manager.cell(block) for block in blocks])

    def _hold(self, hold: _Hold) -> None:
        before = self._holds.pop(hold.key, None)
        if before is not None:  # the same prompt, computed again
            if before.write is not None:
                self._writer.cancel(before.key, before.write, "the prompt was computed again")
            self._wire.manager.release(before.blocks)
        self._ended_keys.pop(hold.key, None)
        self._holds[hold.key] = hold
        ask = self._asks.pop(hold.key, None)
        if ask is not None:
            self._write(hold, ask)

    def _write(self, hold: _Hold, ask: Ask) -> None:
        hold.write = self._writer.begin(ask, hold.blocks, stalls=hold.stalls)

    # -- what comes in ---------------------------------------------------------------------------------------

    def notice(self, notice: Notice) -> None:
        key, hold = notice.key, self._holds.get(notice.key)
        meant = hold is None or notice.number == hold.number
        if notice.kind == "renew":
            if hold is not None and meant and hold.run is None:
                hold.until = self._wire.clock() + self._wire.settings.lease_s
        elif notice.kind in ("fetched", "rejected"):
            if meant:
                self.release(key, "the decode side gave up")
        elif notice.kind == "register":
            until = self._wire.clock() + self._wire.settings.room_timeout_s
            self._register(key, hold if meant else None, Ask(notice.sender, notice.ticket, notice.blocks, notice.first, until))

    def _register(self, key: str, hold: _Hold | None, ask: Ask) -> None:
        if hold is not None and hold.write is None:
            self._write(hold, ask)
        elif hold is not None or key in self._holds or key in self._ended_keys or key in self._asks:
            self._writer.refuse(key, ask, "the blocks are gone")
        elif len(self._asks) >= _MOST_ASKS:
            self._writer.refuse(key, ask, "too many wait for blocks already")
        else:
            self._asks[key] = ask

    def release(self, key: str, why: str) -> bool:
        """Release the blocks kept for this hand-over, now or later. Returns true if there were any."""
        hold = self._holds.pop(key, None)
        run = self._room_runs.get(key)
        self._stop(key, hold, why)
        if run is not None:
            self._give_up(run, why)
        elif hold is not None:
            self._wire.manager.release(hold.blocks)
        self._mark_ended(key)
        return hold is not None or run is not None

    def _stop(self, key: str, hold: _Hold | None, why: str) -> None:
        if hold is not None and hold.write is not None:
            self._writer.cancel(key, hold.write, why)
        elif (ask := self._asks.pop(key, None)) is not None:
            self._writer.refuse(key, ask, why)

    def drop(self, side: Side) -> None:
        """Drop a sequence that ended. It can make no offer any more; the scheduler frees its blocks."""
        in_room = self._room_runs.pop(side.key, None) is not None
        if in_room or not (side.room or side.key in self._holds):
            self._stop(side.key, self._holds.pop(side.key, None), "the prefill side is gone")
            self._mark_ended(side.key)

    def release_all(self) -> None:
        for key in list(self._holds):
            self.release(key, "the prefill engine sleeps")

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self) -> list[tuple[SequenceRun, Output]]:
        """Do what is due. Returns the sequences that end with it, and their last outputs."""
        now = self._wire.clock()
        for hold in list(self._holds.values()):
            if hold.write is not None:
                if self._writer.is_over(hold.write, now):
                    del self._holds[hold.key]
                    self._written(hold, self._writer.end(hold.key, hold.write))
            elif hold.until <= now:
                del self._holds[hold.key]
                self._expire(hold)
        for key in [key for key, ask in self._asks.items() if ask.until <= now]:
            self._writer.refuse(key, self._asks.pop(key), "the prefill side did not come")
        self._writer.tick()
        ended, self._ended = self._ended, []
        return ended

    def next_at(self) -> float | None:
        """Return the time at which `tick` has something to do, unless the endpoint has something before."""
        if self._ended:
            return self._wire.clock()
        due = [hold.until if hold.write is None else hold.write.due for hold in self._holds.values()]
        due += [ask.until for ask in self._asks.values()]
        return min(due, default=None)

    def _written(self, hold: _Hold, error: str) -> None:
        self._mark_ended(hold.key)
        if hold.run is None:
            self._wire.manager.release(hold.blocks)
        elif error or hold.output is None:
            self._give_up(hold.run, error)
        else:
            self._room_runs.pop(hold.key, None)
            self._ended.append((hold.run, hold.output))

    def _expire(self, hold: _Hold) -> None:
        self.expired += 1
        self._mark_ended(hold.key)
        if hold.run is None:
            self._wire.manager.release(hold.blocks)
        else:
            self._give_up(hold.run, "the decode side did not come")

    def _give_up(self, run: SequenceRun, why: str) -> None:
        if run.side is not None:
            self._room_runs.pop(run.side.key, None)
        self._ended.append((run, Output(run.id, [], fault=Fault("transfer_failed", why, True))))

    def _mark_ended(self, key: str) -> None:
        self._ended_keys[key] = None
        if len(self._ended_keys) > _MOST_ENDED:
            self._ended_keys.popitem(last=False)
