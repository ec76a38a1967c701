"""Holds the quotas of keys and tenants: every request is counted before its body is read, its tokens before it is submitted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from headrace.broker.keys.records import NO_LIMITS, Limits
from headrace.frontend.auth.caller import Caller
from headrace.frontend.auth.meter import Meter
from headrace.frontend.auth.rate_headers import RateHeaders, headers_of
from headrace.frontend.errors import QuotaExceeded
from headrace.jetstream.subjects import tenant_owner

_PAIRS = 4096  # kept; beyond that they are made again
RESERVED_OUTPUT = 2048  # tokens of an answer that are reserved at most; what is longer is counted at its end


class Quotas:
    """The meters of all owners that have limits. `tenants` are the limits of tenants, by token."""

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._meters: dict[str, Meter] = {}
        self._tenants: dict[str, Limits] = {}
        self._pairs: dict[tuple[str, str], Meters] = {}  # of key and tenant

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
        meters = self._pairs.get((caller.key, tenant))
        if meters is None or meters.key_limits is not key_limits or meters.tenant_limits is not tenant_limits:
            meters = self._pair(caller.key, key_limits, tenant, tenant_limits)
        now = self._wall()
        hold = Hold(meters, self._wall)
        if not meters.have_room(now):
            self._refuse(hold, now)
        for window in meters.requests:
            window.left -= 1
            window.unsent += 1
        for meter in meters.all:
            meter.open += 1
        return hold

    def _refuse(self, hold: Hold, now: float) -> None:
        try:
            for meter in hold.meters.all:
                meter.check_request(now)
        except QuotaExceeded as error:
            error.more_headers = headers_of(hold.header_lines(anthropic=False))
            raise

    def _pair(self, key: str, key_limits: Limits, tenant: str, tenant_limits: Limits | None) -> Meters:
        found = []
        if key_limits is not NO_LIMITS:
            found.append(self._meter(f"k-{key}", "this API key", key_limits))
        if tenant_limits is not None:
            found.append(self._meter(tenant_owner(tenant), "this tenant", tenant_limits))
        if len(self._pairs) >= _PAIRS:
            self._pairs.clear()
        pair = self._pairs[key, tenant] = Meters(found, key_limits, tenant_limits)
        return pair

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


class Meters:
    """The meters of a key and its tenant, with their limited windows side by side, so that a request walks through them once.

    To be made anew when limits change. `turn` looks at the windows only when one of them is over: in between they are used
    without a call, which is most of what a request costs here.
    """

    __slots__ = (
        "_begins",
        "_ends",
        "all",
        "anthropic",
        "busy",
        "key_limits",
        "limited",
        "openai",
        "requests",
        "tenant_limits",
        "tokens",
    )

    def __init__(self, meters: list[Meter], key_limits: Limits, tenant_limits: Limits | None) -> None:
        self.key_limits, self.tenant_limits = key_limits, tenant_limits
        self.all = tuple(meters)
        self.busy = tuple((meter, meter.limits.concurrent) for meter in meters if meter.limits.concurrent)
        self.requests = tuple(meter.requests for meter in meters if meter.requests.limit)
        tokens_a_minute = tuple(meter.tokens for meter in meters if meter.tokens.limit)
        self.tokens = (*tokens_a_minute, *(meter.day for meter in meters if meter.day.limit))
        self.limited = (*self.requests, *self.tokens)
        self.openai = RateHeaders(self.requests, tokens_a_minute, anthropic=False)
        self.anthropic = RateHeaders(self.requests, tokens_a_minute, anthropic=True)
        self._begins = self._ends = 0.0  # of the time in which none of the windows ends

    def turn(self, now: float) -> None:
        """Begin the windows of Unix time `now`, where others were counted so far."""
        if self._begins <= now < self._ends:
            return
        for window in self.limited:
            window.turn(now)
        self._begins = max((window.begins for window in self.limited), default=-math.inf)
        self._ends = min((window.ends for window in self.limited), default=math.inf)

    def have_room(self, now: float) -> bool:
        """Return True if there is room for one more request, and for a token."""
        self.turn(now)
        for meter, most in self.busy:
            if meter.open + meter.elsewhere >= most:
                return False
        for window in self.limited:  # noqa: SIM110 - a generator is slower, and this is in the path of every request
            if window.left < 1:
                return False
        return True


class Hold:
    """The share of an open request in the quotas of its key and its tenant."""

    __slots__ = ("_reserved", "_wall", "meters")

    def __init__(self, meters: Meters, wall: Callable[[], float]) -> None:
        self.meters = meters
        self._wall = wall
        self._reserved = 0

    def reserve(self, prompt: int, output: int) -> None:
        """Reserve the tokens of a prompt and of the longest answer. Raises QuotaExceeded with the headers for the answer."""
        now, tokens = self._wall(), prompt + output
        meters = self.meters
        meters.turn(now)
        for window in meters.tokens:
            if window.left < tokens:
                self._refuse(now, tokens)
        self._reserved = tokens
        for window in meters.tokens:
            window.left -= tokens
            window.unsent += tokens

    def _refuse(self, now: float, tokens: int) -> None:
        try:
            for meter in self.meters.all:
                meter.check_tokens(now, tokens)
        except QuotaExceeded as error:
            error.more_headers = headers_of(self.header_lines(anthropic=False))
            raise

    def settle(self, used: int) -> None:
        """Count what was used in place of what was reserved."""
        rest = used - self._reserved
        self._reserved = used
        if rest:
            self.meters.turn(self._wall())
            for window in self.meters.tokens:
                window.left -= rest
                window.unsent += rest

    def leave(self) -> None:
        """End the request."""
        for meter in self.meters.all:
            meter.open -= 1

    def header_lines(self, *, anthropic: bool) -> bytes:
        """Return the rate limit headers as OpenAI sends them, or Anthropic."""
        meters, now = self.meters, self._wall()
        meters.turn(now)
        return (meters.anthropic if anthropic else meters.openai).lines(now)


def longest_output(max_tokens: int, choices: int) -> int:
    """Return the tokens to reserve for the answers of a job."""
    return choices * min(max_tokens, RESERVED_OUTPUT)
