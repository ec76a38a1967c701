"""What a prefill side writes into the memory of a decode side that asked for it.

Every ask is answered once: "written", or "refused" when nothing of it will come any more.  Until then the asking side keeps its
blocks, for they may be written to at any moment; so a write that is cancelled is answered when it has settled.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.workers.sim.transfer.fabric import Notice, Transfer
from headrace.workers.sim.transfer.handover_state import HandoverWire, segments


@dataclass(frozen=True, slots=True)
class Ask:
    """Where a decode side wants its blocks written to, beginning with the one of this number."""

    engine: str
    ticket: int
    blocks: tuple[int, ...]
    first: int
    until: float


@dataclass(slots=True)
class Write:
    """One ask that is being met."""

    ask: Ask
    blocks: list[int]  # own ones
    began: float
    done_at: float  # as modelled
    until: float
    transfer: Transfer | None  # None: stalled

    @property
    def due(self) -> float:
        """When it is over, if the real transfer is by then."""
        return min(self.done_at, self.until) if self.transfer is not None and self.transfer.ended else self.until


@dataclass(frozen=True, slots=True)
class _Cancelled:
    """A write that nobody wants any more and that still moves something."""

    key: str
    ask: Ask
    blocks: list[int]
    transfer: Transfer
    why: str


class BlockWriter:
    """All writes of a prefill engine."""

    def __init__(self, wire: HandoverWire) -> None:
        self._wire = wire
        self.closing: list[_Cancelled] = []
        self.counts: dict[str, float] = {"written_blocks": 0, "failed_writes": 0, "write_s": 0.0}

    def begin(self, ask: Ask, blocks: list[int], *, stalls: bool) -> Write:
        """Write what is asked for of these blocks."""
        wire, now = self._wire, self._wire.clock()
        given = blocks[ask.first : ask.first + len(ask.blocks)]
        taken = ask.blocks[: len(given)]
        done_at = wire.link.take(now, wire.transfer_s(len(given), segments(given, taken)))
        transfer = None if stalls else wire.endpoint.write(ask.engine, given, taken)
        return Write(ask, given, now, done_at, now + wire.settings.transfer_timeout_s, transfer)

    def over(self, write: Write, now: float) -> bool:
        transfer = write.transfer
        return write.until <= now or (transfer is not None and (transfer.failed or (transfer.ended and write.done_at <= now)))

    def end(self, key: str, write: Write) -> str:
        """Tell the other side how it went: empty, or why it failed."""
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
        """Nobody wants this any more. Its blocks stay as long as they are being read."""
        if write.transfer is None or write.transfer.settled:
            self.refuse(key, write.ask, why)
            return
        self._wire.manager.keep(write.blocks)
        self.closing.append(_Cancelled(key, write.ask, write.blocks, write.transfer, why))

    def refuse(self, key: str, ask: Ask, why: str) -> None:
        """Nothing will come for this ask."""
        notice = Notice(kind="refused", key=key, sender=self._wire.engine, ticket=ask.ticket, reason=why)
        self._wire.endpoint.notify(ask.engine, notice)

    def tick(self) -> None:
        """Answer for the cancelled writes that have settled."""
        if not self.closing:
            return
        settled = [item for item in self.closing if item.transfer.settled]
        self.closing = [item for item in self.closing if not item.transfer.settled]
        for item in settled:
            self._wire.manager.release(item.blocks)
            self.refuse(item.key, item.ask, item.why)
