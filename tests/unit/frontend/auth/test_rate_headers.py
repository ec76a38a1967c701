"""Rate limit headers: what is left in which window, and when that one ends."""

from __future__ import annotations

from headrace.frontend.auth.rate_headers import RateHeaders, headers_of
from headrace.frontend.auth.usage_window import UsageWindow


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
