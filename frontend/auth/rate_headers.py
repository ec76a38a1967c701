"""Writes the rate limit headers of answers, as OpenAI sends them or Anthropic."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.frontend.auth.usage_window import UsageWindow

_OPENAI = ("x-ratelimit-limit-{}", "x-ratelimit-remaining-{}", "x-ratelimit-reset-{}")
_ANTHROPIC = ("anthropic-ratelimit-{}-limit", "anthropic-ratelimit-{}-remaining", "anthropic-ratelimit-{}-reset")


class RateHeaders:
    """The headers for requests and tokens per minute in these windows: of each kind those of the tighter limit.

    Everything but what is left is text before a request comes; when the minute ends is worked out once per second.
    """

    __slots__ = ("_anthropic", "_kinds", "_told_until")

    def __init__(self, requests: Sequence[UsageWindow], tokens: Sequence[UsageWindow], *, anthropic: bool) -> None:
        """The windows must keep their limits."""
        self._anthropic = anthropic
        self._told_until = 0.0
        # of each kind its windows, each with the text before what is left, the name of the last header, and the text after
        self._kinds: list[tuple[list[tuple[UsageWindow, str]], str, str]] = []
        for kind, windows in (("requests", requests), ("tokens", tokens)):
            if windows:
                limit, remaining, reset = (name.format(kind) for name in (_ANTHROPIC if anthropic else _OPENAI))
                texts = [(window, f"{limit}: {window.limit}\r\n{remaining}: ") for window in windows]
                self._kinds.append((texts, reset, ""))

    def lines(self, now: float) -> bytes:
        """Return the headers of Unix time `now`, to which the windows have been turned, as lines with their ends."""
        if not self._told_until - 1.0 <= now < self._told_until:
            self._tell_resets(now)
        text = ""
        for windows, _, after in self._kinds:
            tightest, before = windows[0]
            for window, its in windows:
                if window.left < tightest.left:
                    tightest, before = window, its
            text += f"{before}{max(0, tightest.left)}{after}"
        return text.encode()

    def _tell_resets(self, now: float) -> None:
        self._told_until = now // 1 + 1
        for number, (windows, reset, _) in enumerate(self._kinds):
            ends = windows[0][0].ends
            told = _time(ends) if self._anthropic else f"{max(1, round(ends - now))}s"
            self._kinds[number] = windows, reset, f"\r\n{reset}: {told}\r\n"


def _time(unix: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix))


def headers_of(lines: bytes) -> list[tuple[bytes, bytes]]:
    """Return the names and values of header lines."""
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines.split(b"\r\n")[:-1])]
