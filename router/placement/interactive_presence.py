"""Tells whether interactive work is there or may be due: some waits or runs in the pool, or did so within the last seconds.

Batch requests are placed with regard for interactive ones only then.  Placements of other routers show in the load reports.
"""

from __future__ import annotations

from math import inf

from headrace.broker.messages import LoadReport


class InteractivePresence:
    """Keeps when interactive work was last seen. Times are seconds of the scheduler's clock."""

    def __init__(self, quiet_s: float) -> None:
        """`quiet_s`: without any for so long, none is thought to be due."""
        self._quiet_s = quiet_s
        self._seen_s = -inf

    def see(self, now_s: float) -> None:
        """Note that there is an interactive request."""
        self._seen_s = now_s

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """Note whether a worker runs anything but batch requests."""
        if report.running > report.batch:
            self._seen_s = now_s

    def expected(self, now_s: float) -> bool:
        """Return whether interactive work is there, or was within the last `quiet_s`."""
        return now_s - self._seen_s < self._quiet_s
