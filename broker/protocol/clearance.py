"""Clears a job of its crashes once a later run has gone well past the place where it stood when they happened.

Poison crashes there again, an innocent job goes on.  A job that crashes every few seconds would be cleared in between each
time, so from the third time on clearing takes ever longer.

Sans-io: the time is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence

CLEAR_AFTER_S = 0.5  # from the first frame of the run
CLEAR_TOKENS = 8  # further, of every choice that is still open
EASY_CLEARANCES = 2  # that take no longer than the first
LONGEST_S = 60.0


def clear_after_s(clearances: int) -> float:
    """Return the time that a run has to go on to clear a job that was cleared so often before."""
    return min(CLEAR_AFTER_S * 2.0 ** min(max(0, clearances - EASY_CLEARANCES + 1), 16), LONGEST_S)


class Clearance:
    """The progress of one run of a job against which crashes count."""

    __slots__ = ("_after_s", "_left", "_since_s")

    def __init__(self, emitted: Sequence[int], open_choices: Sequence[int], after_s: float) -> None:
        """`emitted`: tokens of each choice when the run began."""
        self._after_s = after_s
        self._left = {choice: emitted[choice] + CLEAR_TOKENS for choice in open_choices}
        self._since_s: float | None = None

    def reached(self, choice: int, tokens: int, now_s: float, *, ended: bool = False) -> bool:
        """Note that a choice has so many tokens. True once the run has gone far enough to clear its job."""
        if self._since_s is None:
            self._since_s = now_s
        if ended or tokens >= self._left.get(choice, 0):
            self._left.pop(choice, None)
        return not self._left and now_s - self._since_s >= self._after_s
