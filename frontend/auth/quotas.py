"""Quotas of keys and tenants: requests are counted before the body is read, tokens before the job is submitted."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.keys import NO_LIMITS, Limits, OpenCounts, UsageCounters
from headrace.frontend.auth.caller import Caller
from headrace.frontend.errors import QuotaExceeded
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.subjects import Subjects, tenant_owner


class UsageWindow:
    """A quantity of an owner. `limit` 0 counts without a limit.

    What was counted here goes to the server by `take`, and `learn` brings the sum of all frontends back. Until then only the
    own part is known, so the sum may be behind by what the others have counted since.

    `left` is what is left of the limit in the window from `begins` to `ends` (Unix time), less than 0 if too much was used;
    `unsent` is what was counted since the last `take`. Who has called `turn` for the time may use them without a call.
    """

    __slots__ = ("_late", "_number", "_sending", "begins", "ends", "left", "length_s", "limit", "unsent")

    def __init__(self, length_s: float, limit: int) -> None:
        self.length_s = length_s
        self.limit = limit
        self._number = -1
        self.begins = self.ends = 0.0
        self.left = limit
        self._sending = self.unsent = 0
        self._late: list[tuple[int, int]] = []  # of windows that are over

    def limit_to(self, limit: int) -> None:
        """Hold another limit from now on. What was used stays used."""
        self.left += limit - self.limit
        self.limit = limit

    def used(self, now: float) -> int:
        """Return the known use in the window of Unix time `now`."""
        return self.limit - self.room(now)

    def room(self, now: float) -> int:
        """Return the remaining amount, negative after overuse. Call it only with a limit."""
        self.turn(now)
        return self.left

    def ends_in_s(self, now: float) -> float:
        return self.length_s - now % self.length_s

    def number(self, now: float) -> int:
        return int(now // self.length_s)

    def add(self, now: float, amount: int) -> None:
        """Count in the window of `now`; a negative amount gives back."""
        self.turn(now)
        self.left -= amount
        self.unsent += amount

    def take(self, now: float) -> list[tuple[int, int]]:
        """Return the (window, amount) pairs to send. Each ends in a call of `learn` or `failed`."""
        self.turn(now)
        taken, self._late = self._late, []
        if self.unsent and not self._sending:
            taken.append((self._number, self.unsent))
            self._sending, self.unsent = self.unsent, 0
        return taken

    def learn(self, window: int, total: int | None) -> None:
        """Take the sum of all frontends, which includes what was sent. None: the server does not count."""
        if window == self._number:
            if total is not None:
                self.left = self.limit - total - self.unsent
            self._sending = 0

    def failed(self, window: int, amount: int) -> None:
        if window == self._number and self._sending:
            self.unsent += self._sending
            self._sending = 0
        else:
            self._late.append((window, amount))

    def turn(self, now: float) -> None:
        """Begin the window of Unix time `now`, if another one was counted so far."""
        if self.begins <= now < self.ends:
            return
        number = self.number(now)
        if self.unsent:
            self._late.append((self._number, self.unsent))
        self._number = number
        self.begins, self.ends = number * self.length_s, (number + 1) * self.length_s
        self.left, self._sending, self.unsent = self.limit, 0, 0


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
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines.split(b"\r\n")[:-1])]


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
        self.limits = limits
        self.requests.limit_to(limits.requests_per_minute)
        self.tokens.limit_to(limits.tokens_per_minute)
        self.day.limit_to(limits.tokens_per_day)

    def windows(self) -> tuple[tuple[str, UsageWindow], ...]:
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
        limits = self._tenants.get(tenant)
        if limits is not None:
            self._meter(tenant_owner(tenant), "this tenant", limits).count_tokens(self._wall(), tokens)

    def meters(self) -> Iterable[Meter]:
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
        if self._begins <= now < self._ends:
            return
        for window in self.limited:
            window.turn(now)
        self._begins = max((window.begins for window in self.limited), default=-math.inf)
        self._ends = min((window.ends for window in self.limited), default=math.inf)

    def have_room(self, now: float) -> bool:
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
        rest = used - self._reserved
        self._reserved = used
        if rest:
            self.meters.turn(self._wall())
            for window in self.meters.tokens:
                window.left -= rest
                window.unsent += rest

    def leave(self) -> None:
        for meter in self.meters.all:
            meter.open -= 1

    def header_lines(self, *, anthropic: bool) -> bytes:
        meters, now = self.meters, self._wall()
        meters.turn(now)
        return (meters.anthropic if anthropic else meters.openai).lines(now)


def longest_output(max_tokens: int, choices: int) -> int:
    return choices * min(max_tokens, RESERVED_OUTPUT)


log = structlog.get_logger()

SHARE_S = 0.25
SILENT_S = 2.0  # what a frontend said of its open requests counts for so long
AT_ONCE = 64  # additions on their way
_REMIND_ROUNDS = 4  # open requests are told again, for frontends that were not there


class QuotaShare:
    """Keeps the quotas of one frontend in step with those of the others. Run it beside the server.

    A limit can be passed by what the other frontends admit within one round, `SHARE_S`; sums are exact after it.
    """

    def __init__(
        self,
        quotas: Quotas,
        messaging: Messaging,
        subjects: Subjects,
        *,
        me: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._quotas = quotas
        self._messaging = messaging
        self._subject = subjects.quota_open()
        self._counters = UsageCounters(messaging, subjects)
        self._me = me
        self._wall = wall
        self._others: dict[str, tuple[float, dict[str, int]]] = {}  # ingress → when it spoke, and its open requests
        self._told: dict[str, int] = {}
        self._quiet_rounds = 0
        self._warned = False

    async def run(self) -> None:
        subscription = await self._messaging.subscribe(self._subject, self._on_open)
        try:
            while True:
                await asyncio.sleep(SHARE_S)
                await self.round()
        finally:
            await subscription.unsubscribe()

    async def round(self) -> None:
        """Send what was counted, learn the sums, and tell and hear about open requests."""
        now = self._wall()
        self._tell()
        self._hear(now)
        due = [
            (meter.owner, kind, window, number, amount)
            for meter in self._quotas.meters()
            for kind, window in meter.windows()
            for number, amount in window.take(now)
        ]
        for at in range(0, len(due), AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for each in due[at : at + AT_ONCE]:
                    group.create_task(self._add(*each))

    async def _add(self, owner: str, kind: str, window: UsageWindow, number: int, amount: int) -> None:
        try:
            total = await self._counters.add(owner, kind, number, amount)
        except JetStreamError as error:
            window.failed(number, amount)
            self._warn("quota.not_shared", error=str(error))
            return
        window.learn(number, total)
        if total is None:
            self._warn("quota.not_shared", error="the NATS server does not count: quotas hold per frontend (needs 2.12)")
        else:
            self._warned = False

    def _warn(self, event: str, **fields: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(event, **fields)

    def _tell(self) -> None:
        mine = {meter.owner: meter.open for meter in self._quotas.meters() if meter.limits.concurrent and meter.open}
        self._quiet_rounds += 1
        if mine == self._told and (not mine or self._quiet_rounds < _REMIND_ROUNDS):
            return
        self._told, self._quiet_rounds = mine, 0
        self._messaging.send(self._subject, encode(OpenCounts(ingress=self._me, open=mine)))

    def _hear(self, now: float) -> None:
        sums: dict[str, int] = {}
        for ingress, (at, counts) in list(self._others.items()):
            if now - at > SILENT_S:
                del self._others[ingress]
                continue
            for owner, count in counts.items():
                sums[owner] = sums.get(owner, 0) + count
        self._quotas.hear(sums)

    def _on_open(self, message: Message) -> None:
        try:
            counts = decode(OpenCounts, message.data)
        except WireError as error:
            log.warning("quota.unreadable", error=str(error))
            return
        if counts.ingress != self._me:
            self._others[counts.ingress] = self._wall(), {o: n for o, n in counts.open.items() if n > 0}
            self._hear(self._wall())
