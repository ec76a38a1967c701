"""Moves the quantile of the forecast that workers are planned for by how many requests really miss their targets.

How much headroom a load needs is not known before: bursts that come sooner than a worker can start are late at every quantile,
and answers of two tokens are late in one step. So the quantile goes up by each late request and down a little by every one, and
settles where somewhat fewer are late than may be (as in adaptive conformal inference, Gibbs and Candès 2021). What many late
requests of one look add is bounded: a burst is over before it could teach anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.planner.capacity import Targets
from headrace.planner.observation import OutcomeSight

AIM = 0.7  # of the share that may be late
GAIN = 1e-5  # by which a late request moves the quantile, divided by the share that may be late
MOST_UP = 0.003  # at one look
LOWEST, HIGHEST = 0.5, 0.98  # below the median it would be no headroom
SHOWN = 0.001  # a smaller change is none


class LiveConfidence:
    """The quantile of one pool."""

    def __init__(self, first: float, targets: Targets, *, moves: bool) -> None:
        """`first`: the quantile at the beginning, and for ever unless it `moves`."""
        self.value = first
        self._exact = first
        self._targets = targets
        self._moves = moves

    def note(self, ended: Iterable[OutcomeSight]) -> bool:
        """Learn from the requests that have ended since the last look. Returns whether `value` has changed."""
        if not self._moves:
            return False
        count = late = 0
        for one in ended:
            count += 1
            late += one.ttft_s > self._targets.ttft_s or one.itl_s > self._targets.itl_s
        miss = self._targets.miss
        change = min(MOST_UP, GAIN / miss * (late - AIM * miss * count))
        self._exact = min(max(HIGHEST, self.value), max(min(LOWEST, self.value), self._exact + change))
        if abs(self._exact - self.value) < SHOWN:
            return False
        self.value = self._exact
        return True

    def load(self, value: float) -> None:
        """Take a stored quantile over."""
        if self._moves and LOWEST <= value <= HIGHEST:
            self.value = self._exact = value
