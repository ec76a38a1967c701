"""Decides after how long an engine that has work and reports nothing counts as dead, by the steps that it has made before.

An engine that makes a step in 20 ms is dead long before the two minutes that one may need that computes long prompts on a CPU.
"""

from __future__ import annotations

FACTOR = 20.0  # of the longest step lately
LEAST_S = 30.0  # what an engine may do between two steps without a word: compile a kernel, or a grammar
SURE_FACTOR = 3.0  # a step as long as the longest one, and twice that on top, is never held against the engine
WINDOW_S = 300.0  # steps are remembered for one to two of these


class StallLimit:
    """The limit of one engine: `setting_s` until a step was seen, and again when none was for long.

    With steps seen it is 20 times the longest of them, at least 30 s and at most the setting, but never below 3 times that
    step.
    """

    def __init__(self, setting_s: float) -> None:
        self._setting_s = setting_s
        self._longest_s = self._before_s = 0.0  # of this window and of the one before
        self._window_ends_s: float | None = None

    def step(self, took_s: float) -> None:
        """Take note of a step. Cheap, because engines make thousands a second."""
        if took_s > self._longest_s:
            self._longest_s = took_s

    def roll(self, now_s: float) -> None:
        """Forget old steps. To be called every second or so."""
        if self._window_ends_s is None:
            self._window_ends_s = now_s + WINDOW_S
        elif now_s >= self._window_ends_s:
            over_s = now_s - self._window_ends_s
            self._before_s = self._longest_s if over_s < WINDOW_S else 0.0
            self._longest_s = 0.0
            self._window_ends_s = now_s + WINDOW_S

    @property
    def limit_s(self) -> float:
        """Return the limit in seconds."""
        longest_s = max(self._longest_s, self._before_s)
        if not longest_s:
            return self._setting_s
        followed_s = min(max(FACTOR * longest_s, LEAST_S), self._setting_s)
        return max(followed_s, SURE_FACTOR * longest_s)
