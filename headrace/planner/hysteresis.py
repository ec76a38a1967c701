"""Keeps the number of workers of one role from going up and down: up at once, down only when that has long been enough.

A worker that was started is kept for two start-ups at least, so up, down and up again within that time cannot happen.
"""

from __future__ import annotations

from collections import deque

START_UPS = 2.0  # for which a number stays after it went up
LEAST_WINDOW_S = 30.0
KEPT = 4000


class Hysteresis:
    """The history of one role. Times are Unix seconds."""

    def __init__(self, *, window_s: float) -> None:
        """`window_s`: for so long fewer must have been enough."""
        self._window_s = window_s
        self._needs: deque[tuple[float, int]] = deque(maxlen=KEPT)
        self.up_s: float | None = None
        self.down_s: float | None = None

    def note(self, need: int, *, at: float) -> int:
        """Note what is needed now and return the most that was needed lately."""
        window_s = max(self._window_s, LEAST_WINDOW_S)
        self._needs.append((at, need))
        while self._needs and self._needs[0][0] < at - window_s:
            self._needs.popleft()
        return max(one[1] for one in self._needs)

    def may_go_down(self, *, at: float, start_s: float) -> bool:
        """Return whether the last way up is old enough."""
        return self.up_s is None or at - self.up_s >= START_UPS * start_s

    def went(self, change: int, *, at: float) -> None:
        """Note that the number was changed."""
        if change > 0:
            self.up_s = at
        elif change < 0:
            self.down_s = at

    def dump(self) -> dict[str, object]:
        """Return what is stored."""
        return {"needs": [list(one) for one in self._needs], "up_s": self.up_s, "down_s": self.down_s}

    def load(self, needs: list[list[float]], up_s: float | None, down_s: float | None) -> None:
        """Take a stored history over."""
        self._needs.extend((float(at), int(need)) for at, need in needs)
        self.up_s, self.down_s = up_s, down_s
