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
class _Loan:
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
        self.lent: list[_Loan] = []

    def until_settled(self, blocks: list[int], transfer: Transfer) -> None:
        """Pin the target of an own read."""
        self._keep(_Loan(blocks, self._until(), transfer=transfer))

    def until_answered(self, blocks: list[int], ticket: int, peer: str) -> None:
        """Pin the blocks that a peer was asked to write to."""
        if self._wire.endpoint.reaches(peer):
            self._keep(_Loan(blocks, self._until(), ticket, peer, ping_at=self._wire.clock() + PING_S))

    def _until(self) -> float:
        settings = self._wire.settings
        return self._wire.clock() + settings.transfer_timeout_s + settings.room_timeout_s

    def _keep(self, loan: _Loan) -> None:
        self._wire.manager.keep(loan.blocks)
        self.lent.append(loan)

    def answered(self, ticket: int) -> None:
        """Unpin the blocks of this ticket: the peer writes to them no more."""
        self._release([loan for loan in self.lent if loan.transfer is None and loan.ticket == ticket])

    def tick(self) -> None:
        """Unpin blocks that can no longer be written to."""
        now = self._wire.clock()
        for loan in self.lent:
            if loan.until <= now:
                _log.warning("blocks.unanswered", engine=self._wire.engine, peer=loan.peer, blocks=len(loan.blocks))
        self._release([loan for loan in self.lent if loan.until <= now or self._over(loan, now)])

    def _over(self, loan: _Loan, now: float) -> bool:
        if loan.transfer is not None:
            return loan.transfer.settled
        endpoint = self._wire.endpoint
        if loan.ping_at <= now:
            loan.ping_at = now + PING_S
            endpoint.notify(loan.peer, Notice(kind="renew", key="", sender=endpoint.engine))
        return not endpoint.reaches(loan.peer)

    def _release(self, over: list[_Loan]) -> None:
        for loan in over:
            self.lent.remove(loan)
            self._wire.manager.release(loan.blocks)

    def next_at(self) -> float | None:
        """Return the time at which `tick` has something to do, unless the endpoint has something before."""
        return min(
            (loan.until if loan.transfer is not None else min(loan.until, loan.ping_at) for loan in self.lent), default=None
        )
