"""The prefill side of a hand-over: who has computed a prompt keeps its blocks until they are fetched.

Blocks on offer are let go when the other side has them, when it or the caller declines, or when the lease ends; a lease that
ends is silent.  In the pull mode the other side reads by itself.  In the push mode and in rooms it registers the blocks it has
made ready, and this side writes; whichever of the two comes first waits for the other, for a bounded time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from workers.engine import Fault, Output
from workers.sim.fabric import Notice
from workers.sim.run import Run
from workers.sim.wire import Offer, Side, Wire, segments

_MOST_GONE = 4096  # hand-overs remembered as over, so that a late other side need not wait


@dataclass(slots=True)
class _Ask:
    """Where a decode side wants its blocks written to."""

    engine: str
    blocks: tuple[int, ...]
    first: int
    until: float


@dataclass(slots=True)
class _Hold:
    """Blocks kept for the other side. In a room the sequence still owns them, and ends with `output`."""

    key: str
    blocks: list[int]
    until: float
    run: Run | None = None
    output: Output | None = None
    ask: _Ask | None = None
    done_at: float = 0.0  # with `ask`: when all is written


class Giver:
    """All hand-overs of a prefill engine."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._rooms: dict[str, Run] = {}  # sequences that will end in a room
        self._holds: dict[str, _Hold] = {}
        self._asks: dict[str, _Ask] = {}  # that came before the blocks
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._ended: list[tuple[Run, Output]] = []
        self.expired = 0

    @property
    def holding(self) -> int:
        """Hand-overs whose blocks are kept."""
        return len(self._holds)

    def enter(self, run: Run, key: str) -> None:
        """A sequence that is to end in this room was taken in."""
        self._rooms[key] = run
        if key in self._gone:
            self._give_up(run, "the decode side is gone")

    def offer(self, run: Run, output: Output, at: float) -> None:
        """Keep this sequence's blocks from now on, and put into its last output how to fetch them, valid from `at`."""
        wire, settings = self._wire, self._wire.settings
        tokens = len(run.ids) - 1
        blocks = run.blocks[: -(-tokens // settings.block_size)]
        wire.manager.release(run.blocks[len(blocks) :])
        self._stamp(run, blocks, tokens)
        run.blocks = []
        wall = at + wire.wall_offset_s
        offer = Offer(
            engine=wire.engine,
            request=run.id,
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
        self._gone.pop(run.id, None)
        self._hold(_Hold(run.id, blocks, at + settings.lease_s))

    def park(self, run: Run, output: Output, key: str) -> None:
        """This sequence is done but for the hand-over in its room; `output` is its last one."""
        tokens = len(run.ids) - 1
        blocks = run.blocks[: -(-tokens // self._wire.settings.block_size)]
        self._stamp(run, blocks, tokens)
        self._hold(_Hold(key, blocks, self._wire.clock() + self._wire.settings.room_timeout_s, run, output))

    def _stamp(self, run: Run, blocks: list[int], tokens: int) -> None:
        for block, cell in zip(blocks, run.cells(tokens), strict=True):
            self._wire.manager.set_cell(block, cell)

    def _hold(self, hold: _Hold) -> None:
        self._holds[hold.key] = hold
        ask = self._asks.pop(hold.key, None)
        if ask is not None:
            self._write(hold, ask)

    def _write(self, hold: _Hold, ask: _Ask) -> None:
        wire = self._wire
        given = hold.blocks[ask.first : ask.first + len(ask.blocks)]
        ask.blocks = ask.blocks[: len(given)]
        hold.ask = ask
        hold.done_at = wire.link.take(wire.clock(), wire.transfer_s(len(given), segments(given, ask.blocks)))

    # -- what comes in ---------------------------------------------------------------------------------------

    def notice(self, notice: Notice) -> None:
        key, hold = notice.key, self._holds.get(notice.key)
        if notice.kind == "renew":
            if hold is not None and hold.run is None:
                hold.until = self._wire.clock() + self._wire.settings.lease_s
        elif notice.kind in ("fetched", "rejected"):
            self.release(key, "the decode side gave up")
        elif notice.kind == "register":
            ask = _Ask(notice.sender, notice.blocks, notice.first, self._wire.clock() + self._wire.settings.room_timeout_s)
            if hold is not None:
                self._write(hold, ask)
            elif key in self._gone:
                self._refuse(key, ask, "the blocks are gone")
            else:
                self._asks[key] = ask

    def release(self, key: str, why: str) -> bool:
        """Let go of what is kept for this hand-over, now or later; whether there was anything."""
        hold = self._holds.pop(key, None)
        run = self._rooms.get(key)
        if run is not None:
            self._give_up(run, why)
        elif hold is not None:
            self._wire.manager.release(hold.blocks)
        if hold is not None and hold.ask is not None:
            self._refuse(key, hold.ask, why)
        elif (ask := self._asks.pop(key, None)) is not None:
            self._refuse(key, ask, why)
        self._forget(key)
        return hold is not None or run is not None

    def drop(self, side: Side) -> None:
        """A sequence ended; what is not on offer by now never will be. Its blocks are the scheduler's business."""
        in_room = self._rooms.pop(side.key, None) is not None
        if in_room or not (side.room or side.key in self._holds):
            self._withdraw(side.key)

    def _withdraw(self, key: str) -> None:
        """Forget a hold whose blocks somebody else lets go of, and tell the decode side."""
        hold = self._holds.pop(key, None)
        ask = hold.ask if hold is not None and hold.ask is not None else self._asks.pop(key, None)
        if ask is not None:
            self._refuse(key, ask, "the prefill side is gone")
        self._forget(key)

    def release_all(self) -> None:
        """Let go of everything on offer."""
        for key in list(self._holds):
            self.release(key, "the prefill engine sleeps")

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self) -> list[tuple[Run, Output]]:
        """Do what is due; the sequences that end with it, and their last outputs."""
        now = self._wire.clock()
        for hold in [hold for hold in self._holds.values() if (hold.done_at if hold.ask else hold.until) <= now]:
            del self._holds[hold.key]
            if hold.ask is not None:
                self._written(hold, hold.ask)
            else:
                self._expire(hold)
        for key in [key for key, ask in self._asks.items() if ask.until <= now]:
            self._refuse(key, self._asks.pop(key), "the prefill side did not come")
        ended, self._ended = self._ended, []
        return ended

    def next_at(self) -> float | None:
        """When `tick` has something to do."""
        if self._ended:
            return self._wire.clock()
        due = [hold.done_at if hold.ask else hold.until for hold in self._holds.values()]
        due += [ask.until for ask in self._asks.values()]
        return min(due, default=None)

    def _written(self, hold: _Hold, ask: _Ask) -> None:
        wire = self._wire
        cells = [wire.manager.cell(block) for block in hold.blocks[ask.first : ask.first + len(ask.blocks)]]
        there = wire.fabric.write(ask.engine, ask.blocks, cells)
        there = there and wire.fabric.notify(ask.engine, Notice(kind="written", key=hold.key, sender=wire.engine))
        self._forget(hold.key)
        if hold.run is None:
            wire.manager.release(hold.blocks)
        elif there and hold.output is not None:
            self._rooms.pop(hold.key, None)
            self._ended.append((hold.run, hold.output))
        else:
            self._give_up(hold.run, "the decode side is gone")

    def _expire(self, hold: _Hold) -> None:
        self.expired += 1
        self._forget(hold.key)
        if hold.run is None:
            self._wire.manager.release(hold.blocks)
        else:
            self._give_up(hold.run, "the decode side did not come")

    def _give_up(self, run: Run, why: str) -> None:
        if run.side is not None:
            self._rooms.pop(run.side.key, None)
        self._ended.append((run, Output(run.id, [], fault=Fault("transfer_failed", why, True))))

    def _refuse(self, key: str, ask: _Ask, why: str) -> None:
        self._wire.fabric.notify(ask.engine, Notice(kind="refused", key=key, sender=self._wire.engine, reason=why))

    def _forget(self, key: str) -> None:
        self._gone[key] = None
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
