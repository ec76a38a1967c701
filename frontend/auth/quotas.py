"""Holds the quotas of keys and tenants: every request is counted before its body is read, its tokens before it is submitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from headrace.broker.keys.records import NO_LIMITS, Limits
from headrace.frontend.auth.caller import Caller
from headrace.frontend.auth.meter import Meter
from headrace.frontend.auth.usage_window import UsageWindow
from headrace.frontend.errors import QuotaExceeded
from headrace.jetstream.subjects import tenant_owner

_ENDS = (b"limit", b"remaining", b"reset")
_OPENAI = tuple(tuple(b"x-ratelimit-%b-%b" % (end, kind) for end in _ENDS) for kind in (b"requests", b"tokens"))
_ANTHROPIC = tuple(tuple(b"anthropic-ratelimit-%b-%b" % (kind, end) for end in _ENDS) for kind in (b"requests", b"tokens"))
RESERVED_OUTPUT = 2048  # tokens of an answer that are reserved at most; what is longer is counted at its end


class Quotas:
    """The meters of all owners that have limits. `tenants` are the limits of tenants, by token."""

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._meters: dict[str, Meter] = {}
        self._tenants: dict[str, Limits] = {}

    def limit_tenants(self, limits: dict[str, Limits]) -> None:
        """Hold these limits of tenants from now on."""
        self._tenants = limits
        for tenant, each in limits.items():
            self._meter(tenant_owner(tenant), "this tenant", each)

    def enter(self, caller: Caller, tenant: str) -> Hold | None:
        """Count a request that begins; None if nothing is limited. Raises QuotaExceeded with the headers for the answer."""
        key_limits, tenant_limits = caller.limits, self._tenants.get(tenant)
        if key_limits is NO_LIMITS and tenant_limits is None:
            return None
        meters = []
        if key_limits is not NO_LIMITS:
            meters.append(self._meter(f"k-{caller.key}", "this API key", key_limits))
        if tenant_limits is not None:
            meters.append(self._meter(tenant_owner(tenant), "this tenant", tenant_limits))
        now = self._wall()
        hold = Hold(meters, self._wall)
        try:
            for meter in meters:
                meter.check_request(now)
        except QuotaExceeded as error:
            error.more_headers = hold.headers(anthropic=False)
            raise
        for meter in meters:
            if meter.limits.requests_per_minute:
                meter.requests.add(now, 1)
            meter.open += 1
        return hold

    def charge(self, tenant: str, tokens: int) -> None:
        """Count the tokens of a stored job of a tenant that has limits."""
        limits = self._tenants.get(tenant)
        if limits is not None:
            self._meter(tenant_owner(tenant), "this tenant", limits).count_tokens(self._wall(), tokens)

    def meters(self) -> Iterable[Meter]:
        """Return all meters that are in use."""
        return self._meters.values()

    def hear(self, counts: dict[str, int]) -> None:
        """Take how many requests of each owner other frontends are answering; owners that are not named have none."""
        for owner, meter in self._meters.items():
            meter.elsewhere = counts.get(owner, 0)

    def _meter(self, owner: str, name: str, limits: Limits) -> Meter:
        meter = self._meters.get(owner)
        if meter is None:
            meter = self._meters[owner] = Meter(owner, name, limits)
        elif meter.limits is not limits:
            meter.limit(limits)
        return meter


class Hold:
    """The share of an open request in the quotas of its key and its tenant."""

    __slots__ = ("_meters", "_reserved", "_wall")

    def __init__(self, meters: list[Meter], wall: Callable[[], float]) -> None:
        self._meters = meters
        self._wall = wall
        self._reserved = 0

    def reserve(self, prompt: int, output: int) -> None:
        """Reserve the tokens of a prompt and of the longest answer. Raises QuotaExceeded with the headers for the answer."""
        now, tokens = self._wall(), prompt + output
        try:
            for meter in self._meters:
                meter.check_tokens(now, tokens)
        except QuotaExceeded as error:
            error.more_headers = self.headers(anthropic=False)
            raise
        self._reserved = tokens
        for meter in self._meters:
            meter.count_tokens(now, tokens)

    def settle(self, used: int) -> None:
        """Count what was used in place of what was reserved."""
        now, rest = self._wall(), used - self._reserved
        self._reserved = used
        if rest:
            for meter in self._meters:
                meter.count_tokens(now, rest)

    def leave(self) -> None:
        """End the request."""
        for meter in self._meters:
            meter.open -= 1

    def headers(self, *, anthropic: bool) -> list[tuple[bytes, bytes]]:
        """Return the rate limit headers as OpenAI sends them, or Anthropic: of each kind those of the tighter limit."""
        now, found = self._wall(), []
        names = _ANTHROPIC if anthropic else _OPENAI
        for kind, (limit, remaining, reset) in enumerate(names):
            tightest: UsageWindow | None = None
            room = 0
            for meter in self._meters:
                window = meter.tokens if kind else meter.requests
                if window.limit and (tightest is None or window.room(now) < room):
                    tightest, room = window, window.room(now)
            if tightest is not None:
                until = _reset(now, tightest.ends_in_s(now), anthropic=anthropic)
                found += [(limit, b"%d" % tightest.limit), (remaining, b"%d" % max(0, room)), (reset, until)]
        return found


def _reset(now: float, ends_in_s: float, *, anthropic: bool) -> bytes:
    """Return when a window is over: as a time for Anthropic's clients, as a duration for OpenAI's."""
    if anthropic:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + ends_in_s)).encode()
    return b"%ds" % max(1, round(ends_in_s))


def longest_output(max_tokens: int, choices: int) -> int:
    """Return the tokens to reserve for the answers of a job."""
    return choices * min(max_tokens, RESERVED_OUTPUT)
