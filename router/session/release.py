"""The end of a request in the window: its stored message is acknowledged, or left to another consumer."""

from __future__ import annotations

from headrace.router.session import metrics
from headrace.router.session.credit import RequestCredit
from headrace.router.session.held_request import HeldRequest
from headrace.router.session.state import RouterState


class RequestRelease:
    """Removes requests from the window, and gives the room that becomes free to the pull loops."""

    def __init__(self, state: RouterState, credit: RequestCredit) -> None:
        self._window = state.window
        self._scheduler = state.scheduler
        self._credit = credit

    def settle(self, held: HeldRequest, how: str = "") -> None:
        """Acknowledge the stored request: a worker has it now, or it has ended. `how` is the metric label of a drop, if any."""
        if self._window.remove(held):
            if how:
                metrics.DROPPED.labels(how).inc()
            held.delivery.ack()
            self._credit.freed(held.request_class)

    def drop(self, held: HeldRequest, how: str) -> None:
        """Cancel a request that has no reader any more, and acknowledge it."""
        self._scheduler.cancel([held.id])
        self.settle(held, how)

    def give_back(self, held: HeldRequest) -> None:
        """Leave the request to another consumer: by a nak while the claim on it is ours, else when the server's claim ends."""
        ours = self._window.claims_valid
        if self._window.remove(held):
            metrics.DROPPED.labels("given_back" if ours else "let_go").inc()
            if ours:
                held.delivery.nak()
            self._credit.balance()

    def give_back_waiting(self) -> None:
        """Give every waiting request back. In-flight placements finish, because their outcome must be known."""
        waiting = [held for held in self._window if held.waiting]
        self._scheduler.cancel([held.id for held in waiting])
        for held in waiting:
            self.give_back(held)
        self._window.restart_claims()
