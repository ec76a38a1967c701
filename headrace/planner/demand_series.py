"""Keeps the arrivals of a pool as a series of equal steps, in which a step that was not watched is unknown and not zero."""

from __future__ import annotations

from collections import deque
from math import isnan, nan

import numpy as np

LEAST_WATCHED = 0.5  # of a step: less is no measurement


class DemandSeries:
    """Arrivals per second, step by step, the oldest first. Times are Unix seconds."""

    def __init__(self, *, step_s: float, keep_s: float) -> None:
        self.step_s = step_s
        self.values: deque[float | None] = deque(maxlen=max(2, int(keep_s / step_s)))
        self.first_s = 0.0  # when the oldest kept step began
        self._count = 0.0
        self._watched_s = 0.0
        self._open_s: float | None = None  # when the open step began

    @property
    def open_s(self) -> float | None:
        """Time at which the open step began, None before the first arrival."""
        return self._open_s

    def add(self, count: int | None, *, since_s: float, until_s: float) -> list[float | None]:
        """Note `count` arrivals in a time, None if that is not known, and return the steps that have closed.

        A clock that went back adds nothing: what is recorded stays.
        """
        if until_s <= since_s:
            return []
        if self._open_s is None:
            self._open_s = since_s - since_s % self.step_s
        if until_s - self._open_s > self.step_s * (self.values.maxlen or 1):  # away for longer than is kept
            self.values.clear()
            self._open_s, self._count, self._watched_s = until_s - until_s % self.step_s, 0.0, 0.0
        rate = None if count is None else max(0, count) / (until_s - since_s)
        closed: list[float | None] = []
        at = max(since_s, self._open_s)
        while until_s >= (end := self._open_s + self.step_s):
            if at < end:
                self._note(rate, end - at)
            closed.append(self._close(self._open_s))
            at = max(at, end)
        if until_s > at:
            self._note(rate, until_s - at)
        return closed

    def _note(self, rate: float | None, seconds: float) -> None:
        if rate is not None:
            self._count += rate * seconds
            self._watched_s += seconds

    def _close(self, open_s: float) -> float | None:
        value = self._count / self._watched_s if self._watched_s >= LEAST_WATCHED * self.step_s else None
        self.values.append(value)
        self._open_s = open_s + self.step_s
        self.first_s = self._open_s - len(self.values) * self.step_s
        self._count = self._watched_s = 0.0
        return value

    def known(self, steps: int) -> list[float]:
        """Return the known values among the last `steps`."""
        return [value for value in list(self.values)[-steps:] if value is not None]

    def dump(self) -> dict[str, object]:
        """Return the closed steps as they are stored. The open one is watched anew after a restart."""
        values = np.array([nan if value is None else value for value in self.values], dtype="<f4")
        return {"step_s": self.step_s, "open_s": self._open_s, "values": values.tobytes()}

    def load(self, step_s: float, open_s: float | None, values: bytes) -> bool:
        """Take a stored series over. Returns False for one of other steps, which says nothing here. Raises ValueError."""
        if step_s != self.step_s or open_s is None or not isinstance(values, bytes):
            return False
        self.values.extend(None if isnan(value) else value for value in np.frombuffer(values, dtype="<f4").tolist())
        self._open_s = open_s
        self.first_s = open_s - len(self.values) * step_s
        return True
