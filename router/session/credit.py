"""Pull credit: how many requests of each class the server may still deliver, by the room that is left in the window."""

from __future__ import annotations

from headrace.jetstream.ports import PullLoop
from headrace.jetstream.subjects import BATCH_CLASSES, RequestClass
from headrace.router.session.state import RouterState
from headrace.router.settings import SessionOptions


class RequestCredit:
    """Owns the credit of the pull loops of one session.

    Each class has a window of its own: a window full of ordinary requests must not keep urgent and moved ones out.  Those of
    batch requests are small, because no client waits for their first token.
    """

    def __init__(self, options: SessionOptions, state: RouterState) -> None:
        self._options = options
        self._window = state.window
        self._permission = state.permission
        self._loops: dict[RequestClass, PullLoop] = {}
        self._allowed = False  # requests were asked for, the last time

    def add(self, request_class: RequestClass, loop: PullLoop) -> None:
        """Keep the credit of one more pull loop. It gets none before `balance` is called."""
        self._loops[request_class] = loop

    def balance(self) -> None:
        """Ask for as many requests of each class as its window has room for. Call it whenever room or permission changes."""
        allowed = self._allowed = self._permission.granted and self._window.bytes < self._options.window_bytes
        counts, options = self._window.counts, self._options
        for request_class, loop in self._loops.items():
            most = options.batch_window if request_class in BATCH_CLASSES else options.window
            wanted = max(0, most - counts.get(request_class, 0)) if allowed else 0
            if loop.credit < wanted or (loop.credit and not allowed):
                loop.add_credit(wanted - loop.credit)

    def freed(self, request_class: RequestClass) -> None:
        """Ask for as many as there is room for after a request of this class has left. Quicker than `balance`."""
        options, loop = self._options, self._loops.get(request_class)
        if loop is None or not self._allowed or self._window.bytes >= options.window_bytes:
            self.balance()
            return
        most = options.batch_window if request_class in BATCH_CLASSES else options.window
        missing = most - self._window.counts[request_class] - loop.credit
        if missing > 0:
            loop.add_credit(missing)
