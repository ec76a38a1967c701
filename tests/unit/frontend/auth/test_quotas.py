"""Quotas of keys and tenants, as clients see them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.keys import CLIENT_SCOPES, NO_LIMITS, Limits
from headrace.frontend.auth import quotas as quotas_module
from headrace.frontend.auth.caller import Caller
from headrace.frontend.auth.quotas import Quotas, RateHeaders, UsageWindow, headers_of
from headrace.frontend.errors import QuotaExceeded
from tests.support.frontend.fakes import MODEL, chat, end, row, say
from tests.support.frontend.keyed import Keyed


async def test_requests_of_a_minute_end_with_a_429_that_says_when_to_come_back() -> None:
    bed = Keyed()
    key = bed.key(limits=Limits(requests_per_minute=2))
    first = await bed.ask(key)
    assert (first.headers["x-ratelimit-limit-requests"], first.headers["x-ratelimit-remaining-requests"]) == ("2", "1")
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert (await bed.ask(key)).status == 200
    over = await bed.ask(key)
    assert (over.status, over.error["code"], over.error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(over.headers["retry-after"]) <= 60
    assert over.headers["x-ratelimit-remaining-requests"] == "0"
    assert over.received == 0
    assert len(bed.ingress.jobs) == 2
    assert (await bed.ask(bed.key("other"))).status == 200


async def test_the_refusal_has_the_form_of_the_api() -> None:
    bed = Keyed()
    key = bed.key(limits=Limits(requests_per_minute=1))
    body = {"model": MODEL, "max_tokens": 4, "messages": chat()["messages"]}
    good = await bed.ask(key, "/v1/messages", body)
    assert good.headers["anthropic-ratelimit-requests-limit"] == "1"
    over = await bed.ask(key, "/v1/messages", body)
    assert (over.status, over.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_tokens_are_reserved_before_and_settled_after() -> None:
    bed = Keyed(say("a", "b"))
    key = bed.key(limits=Limits(tokens_per_minute=200))
    prompt = 20  # of `chat()` with the tokenizer of bytes
    big = await bed.ask(key, body=chat(max_tokens=190))
    assert (big.status, big.error["code"]) == (429, "rate_limit_exceeded")
    assert "200 are left" in big.error["message"]
    assert not bed.ingress.jobs
    good = await bed.ask(key, body=chat(max_tokens=100))
    assert good.headers["x-ratelimit-remaining-tokens"] == str(200 - prompt - 100)
    again = await bed.ask(key, body=chat(max_tokens=100))
    assert again.status == 200, "what was not used came back"
    assert int(again.headers["x-ratelimit-remaining-tokens"]) == 200 - (prompt + 2) - (prompt + 100)


async def test_a_longer_answer_than_was_reserved_is_counted_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_module, "RESERVED_OUTPUT", 1)
    bed = Keyed(lambda job: [[row("x", ids=[65] * 50, fin=end())]])
    key = bed.key(limits=Limits(tokens_per_day=60))
    assert (await bed.ask(key)).status == 200
    over = await bed.ask(key)
    assert over.status == 429
    assert "60 tokens per day" in over.error["message"]


async def test_a_failed_request_costs_its_prompt_and_no_answer() -> None:
    bed = Keyed()
    key = bed.key(limits=Limits(tokens_per_minute=200))
    bed.ingress.refusal = RuntimeError("no")
    assert (await bed.ask(key, body=chat(max_tokens=100))).status == 500
    bed.ingress.refusal = None
    assert (await bed.ask(key, body=chat(max_tokens=100))).status == 200


async def test_requests_at_once_are_limited_and_leave() -> None:
    bed = Keyed()
    key = bed.key(limits=Limits(concurrent=1))
    meters: Any = bed.ring.quotas
    assert (await bed.ask(key)).status == 200
    (meter,) = meters.meters()
    assert meter.open == 0
    meter.elsewhere = 1
    over = await bed.ask(key)
    assert (over.status, over.headers["retry-after"]) == (429, "1")
    meter.elsewhere = 0
    assert (await bed.ask(key)).status == 200
    assert meter.open == 0


async def test_the_keys_of_a_tenant_share_its_limits_and_the_newest_decides() -> None:
    bed = Keyed()
    one = bed.key("acme", tenant_limits=Limits(requests_per_minute=1), created=1.0)
    two = bed.key("acme", tenant_limits=Limits(requests_per_minute=2), created=2.0)
    assert [(await bed.ask(key)).status for key in (one, two, one)] == [200, 200, 429]
    gateway = bed.key("gate", scopes=[*CLIENT_SCOPES, "act_as"])
    assert (await bed.ask(gateway, x_headrace_tenant="acme")).status == 429
    assert (await bed.ask(gateway)).status == 200


async def test_what_stored_jobs_use_is_charged_to_their_tenant() -> None:
    bed = Keyed()
    key = bed.key("acme", tenant_limits=Limits(tokens_per_day=1000))
    bed.ring.quotas.charge("acme", 1000)
    bed.ring.quotas.charge("unlimited", 1000)
    assert (await bed.ask(key)).status == 429


async def test_a_probe_counts_nothing() -> None:
    bed = Keyed()
    key = bed.key(limits=Limits(requests_per_minute=1))
    for _ in range(3):
        assert (await bed.ask(key, "/health", method="GET")).status == 200
    assert (await bed.ask(key)).status == 200


def limited(limits: Limits) -> Caller:
    caller = Caller("k", "t", CLIENT_SCOPES)
    caller.limits = limits
    return caller


def test_new_limits_of_a_key_or_its_tenant_hold_from_the_next_request_on() -> None:
    quotas = Quotas(wall=lambda: 1000.0)
    many, one = Limits(requests_per_minute=9), Limits(requests_per_minute=1)
    quotas.limit_tenants({"t": many})
    loose, tight = limited(many), limited(one)
    assert quotas.enter(loose, "t")
    with pytest.raises(QuotaExceeded, match="this API key may use 1 requests"):
        quotas.enter(tight, "t")
    quotas.limit_tenants({"t": one})
    with pytest.raises(QuotaExceeded, match="this tenant may use 1 requests"):
        quotas.enter(loose, "t")
    quotas.limit_tenants({})
    assert quotas.enter(loose, "t")


def test_no_more_pairs_of_keys_and_tenants_are_kept_than_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_module, "_PAIRS", 3)
    quotas = Quotas(wall=lambda: 1000.0)
    gateway = limited(Limits(requests_per_minute=100))
    for number in range(10):
        assert quotas.enter(gateway, f"t{number}")
    assert len(quotas._pairs) <= 3
    for _ in range(90):
        assert quotas.enter(gateway, "t0")
    with pytest.raises(QuotaExceeded):
        quotas.enter(gateway, "t0")


def test_what_two_keys_use_of_their_tenant_is_one_sum_and_begins_anew_with_the_minute() -> None:
    now = 59.0
    quotas = Quotas(wall=lambda: now)
    quotas.limit_tenants({"t": Limits(requests_per_minute=3, tokens_per_minute=100)})
    one, two = limited(NO_LIMITS), limited(NO_LIMITS)
    two.key = "other"
    for key in (one, two, one):
        assert quotas.enter(key, "t")
    for key in (one, two):
        with pytest.raises(QuotaExceeded, match="3 requests per minute"):
            quotas.enter(key, "t")
    now = 60.0
    late = quotas.enter(two, "t")
    assert late is not None
    late.reserve(20, 80)
    with pytest.raises(QuotaExceeded, match="100 tokens per minute"):
        quotas.enter(one, "t")
    now = 121.0
    late.settle(70)
    fresh = quotas.enter(one, "t")
    assert fresh is not None
    assert dict(headers_of(fresh.header_lines(anthropic=False))) == {
        b"x-ratelimit-limit-requests": b"3",
        b"x-ratelimit-remaining-requests": b"2",
        b"x-ratelimit-reset-requests": b"59s",
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"130",  # what was not used comes back where it is known
        b"x-ratelimit-reset-tokens": b"59s",
    }
    now = 100.0  # the clock was set back
    assert quotas.enter(one, "t")


def test_a_window_ends_with_its_time() -> None:
    window = UsageWindow(60.0, 10)
    window.add(120.0, 4)
    assert (window.used(179.9), window.room(179.9)) == (4, 6)
    assert (window.used(180.0), window.room(180.0)) == (0, 10)
    assert window.ends_in_s(150.0) == 30.0
    assert window.take(181.0) == [(2, 4)]  # the sum of the window that is over is still told


def test_the_sum_of_all_frontends_comes_back() -> None:
    window = UsageWindow(60.0, 10)
    window.add(0.0, 2)
    assert window.take(1.0) == [(0, 2)]
    window.add(2.0, 1)
    assert window.used(2.0) == 3
    window.learn(0, 7)
    assert window.used(3.0) == 8
    assert window.take(4.0) == [(0, 1)]
    window.failed(0, 1)
    assert window.used(5.0) == 8
    assert window.take(6.0) == [(0, 1)]
    window.learn(0, None)
    assert window.used(7.0) == 8


def test_another_limit_leaves_what_was_used() -> None:
    window = UsageWindow(60.0, 10)
    window.add(0.0, 8)
    window.limit_to(5)
    assert (window.used(1.0), window.room(1.0)) == (8, -3)
    assert window.take(1.0) == [(0, 8)]
    window.learn(0, 9)
    assert (window.used(2.0), window.room(2.0)) == (9, -4)
    assert (window.used(60.0), window.room(60.0)) == (0, 5)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("share"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("wait"), st.integers(1, 70), st.none()),
    ),
    max_size=60,
)


@given(STEPS)
def test_frontends_that_share_agree_with_the_exact_sum(steps: list[tuple[str, int, int | bool | None]]) -> None:
    """Three frontends, a server that adds, and messages that fail: nothing is counted twice, nothing is lost."""
    windows = [UsageWindow(60.0, 0) for _ in range(3)]
    server: dict[int, int] = {}
    exact: dict[int, int] = {}
    now = 0.0

    def share(window: UsageWindow, *, works: bool) -> None:
        for number, amount in window.take(now):
            if works:
                server[number] = server.get(number, 0) + amount
                window.learn(number, server[number])
            else:
                window.failed(number, amount)

    for kind, which, value in steps:
        if kind == "add":
            assert value is not None
            windows[which].add(now, int(value))
            exact[int(now // 60)] = exact.get(int(now // 60), 0) + int(value)
        elif kind == "share":
            share(windows[which], works=bool(value))
        else:
            now += which
        assert all(window.used(now) <= exact.get(int(now // 60), 0) for window in windows)
    for window in windows * 2:
        share(window, works=True)
    assert server == exact
    for window in windows:
        window.add(now, 1)
        share(window, works=True)
    share(windows[0], works=True)
    current = exact.get(int(now // 60), 0)
    assert windows[-1].used(now) == current + 3


def windows(*limits: int) -> list[UsageWindow]:
    return [UsageWindow(60.0, limit) for limit in limits]


def test_of_each_kind_the_window_in_which_less_is_left_is_told() -> None:
    requests, tokens = windows(5, 9), windows(50, 40)
    told = RateHeaders(requests, tokens, anthropic=False)
    for window in (*requests, *tokens):
        window.add(61.0, 4)
    assert headers_of(told.lines(61.0)) == [
        (b"x-ratelimit-limit-requests", b"5"),
        (b"x-ratelimit-remaining-requests", b"1"),
        (b"x-ratelimit-reset-requests", b"59s"),
        (b"x-ratelimit-limit-tokens", b"40"),
        (b"x-ratelimit-remaining-tokens", b"36"),
        (b"x-ratelimit-reset-tokens", b"59s"),
    ]
    tokens[0].add(61.0, 100)
    assert (b"x-ratelimit-remaining-tokens", b"0") in headers_of(told.lines(61.0))


def test_the_end_of_the_minute_is_told_anew_each_second_and_in_the_next_minute() -> None:
    requests = windows(5)
    told = RateHeaders(requests, [], anthropic=False)

    def reset(now: float) -> bytes:
        requests[0].turn(now)
        return dict(headers_of(told.lines(now)))[b"x-ratelimit-reset-requests"]

    assert [reset(now) for now in (0.0, 0.9, 1.2, 59.9, 60.0, 30.0)] == [b"60s", b"60s", b"59s", b"1s", b"60s", b"30s"]


def test_the_time_is_told_in_anthropic_s_form() -> None:
    tokens = windows(7)
    tokens[0].turn(61.0)
    assert headers_of(RateHeaders([], tokens, anthropic=True).lines(61.0)) == [
        (b"anthropic-ratelimit-tokens-limit", b"7"),
        (b"anthropic-ratelimit-tokens-remaining", b"7"),
        (b"anthropic-ratelimit-tokens-reset", b"1970-01-01T00:02:00Z"),
    ]


def test_without_windows_there_are_no_headers() -> None:
    assert RateHeaders([], [], anthropic=False).lines(1.0) == b""
    assert headers_of(b"a: b: c\r\n") == [(b"a", b"b: c")]
