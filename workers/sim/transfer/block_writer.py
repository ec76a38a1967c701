"""Writes of a prefill side into the memory of a decode side that asked for them.

Every ask is answered once: "written", or "refused" when no more bytes will come.  Until then the asking side keeps its blocks,
for they may be written to at any moment; so a write that is cancelled is answered when it has settled.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.workers.sim.transfer.fabric import Notice, Transfer
from headrace.workers.sim.transfer.handover_state import HandoverWire, segments


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
    """The write that answers an ask."""

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
    """A cancelled write whose transfer has not settled."""

    key: str
    ask: Ask
    blocks: list[int]
    transfer: Transfer
    why: str


class BlockWriter:
    """The writes of a prefill engine."""

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
