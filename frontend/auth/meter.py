"""Measures what one key or tenant uses, and says when it is too much."""

from __future__ import annotations

from headrace.broker.keys.records import Limits
from headrace.frontend.auth.usage_window import UsageWindow
from headrace.frontend.errors import QuotaExceeded

MINUTE_S = 60.0
DAY_S = 86_400.0
BUSY_RETRY_S = 1.0


class Meter:
    """The use of one owner: requests and tokens of a minute, tokens of a day (UTC), requests at once.

    `elsewhere` is how many requests other frontends are answering.
    """

    __slots__ = ("day", "elsewhere", "limits", "name", "open", "owner", "requests", "tokens")

    def __init__(self, owner: str, name: str, limits: Limits) -> None:
        """`owner` is a subject token, `name` what messages call it."""
        self.owner = owner
        self.name = name
        self.limits = limits
        self.requests = UsageWindow(MINUTE_S, limits.requests_per_minute)
        self.tokens = UsageWindow(MINUTE_S, limits.tokens_per_minute)
        self.day = UsageWindow(DAY_S, limits.tokens_per_day)
        self.open = self.elsewhere = 0

    def limit(self, limits: Limits) -> None:
        """Hold other limits from now on. What was used stays used."""
        self.limits = limits
        self.requests.limit_to(limits.requests_per_minute)
        self.tokens.limit_to(limits.tokens_per_minute)
        self.day.limit_to(limits.tokens_per_day)

    def windows(self) -> tuple[tuple[str, UsageWindow], ...]:
        """Return the windows by the kind that their counters have."""
        return ("rpm", self.requests), ("tpm", self.tokens), ("tpd", self.day)

    def check_request(self, now: float) -> None:
        """Raise QuotaExceeded if one more request is too many, or no token is left."""
        limits = self.limits
        if limits.concurrent and self.open + self.elsewhere >= limits.concurrent:
            raise self._exceeded(f"{limits.concurrent} requests at once", BUSY_RETRY_S)
        if limits.requests_per_minute and self.requests.room(now) <= 0:
            raise self._exceeded(f"{limits.requests_per_minute} requests per minute", self.requests.ends_in_s(now))
        self.check_tokens(now, 1)

    def check_tokens(self, now: float, tokens: int) -> None:
        """Raise QuotaExceeded if so many tokens are not left."""
        if self.tokens.limit and self.tokens.room(now) < tokens:
            raise self._out_of_tokens(self.tokens, "minute", now, tokens)
        if self.day.limit and self.day.room(now) < tokens:
            raise self._out_of_tokens(self.day, "day", now, tokens)

    def count_tokens(self, now: float, tokens: int) -> None:
        """Count tokens, or give some back."""
        if self.tokens.limit:
            self.tokens.add(now, tokens)
        if self.day.limit:
            self.day.add(now, tokens)

    def _out_of_tokens(self, window: UsageWindow, per: str, now: float, tokens: int) -> QuotaExceeded:
        left = max(0, window.room(now))
        asked = f"; {left} are left and this request may take {tokens}" if tokens > 1 else ""
        return self._exceeded(f"{window.limit} tokens per {per}{asked}", window.ends_in_s(now))

    def _exceeded(self, what: str, retry_after_s: float) -> QuotaExceeded:
        return QuotaExceeded(f"{self.name} may use {what}", retry_after_s=retry_after_s)
