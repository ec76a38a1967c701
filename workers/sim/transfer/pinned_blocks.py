"""Blocks that a decode engine no longer needs but that may still be written to.

Reading and writing are one-sided: to give such a block to another sequence would let the late bytes of one prompt run into
another.  They stay held until the other side has answered or is gone, or the transfer has settled, for a bounded time.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from headrace.workers.sim.transfer.fabric import Notice, Transfer
from headrace.workers.sim.transfer.handover_state import HandoverWire

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
    """The pinned blocks of one engine."""

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
