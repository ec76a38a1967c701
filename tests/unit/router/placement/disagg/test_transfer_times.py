"""Hand-over times, learnt from what decode workers report."""

from __future__ import annotations

import random
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.messages import LoadReport
from headrace.router.placement.disagg.transfer_times import MOST_S, TransferTimes


def report(took_s: float, tokens: int, worker: str = "d") -> LoadReport:
    return LoadReport(
        worker=worker, epoch=1, n=1, at=0.0, slots=1, running=0, waiting=0, handover_s=took_s, handover_tokens=tokens
    )


def made() -> TransferTimes:
    return TransferTimes(fixed_s=0.03, per_token_s=5e-6)


def test_before_anything_is_reported_the_prior_counts() -> None:
    assert made().seconds(10_000) == pytest.approx(0.08)


@pytest.mark.parametrize(("fixed_s", "per_token_s"), [(0.02, 3e-6), (0.3, 1e-4), (0.001, 2e-7), (0.05, 1e-9)])
def test_what_is_reported_is_learnt(fixed_s: float, per_token_s: float) -> None:
    times, rng = made(), random.Random(1)
    for _ in range(200):
        tokens = rng.randrange(100, 30_000)
        times.observe(report((fixed_s + tokens * per_token_s) * rng.uniform(0.9, 1.1), tokens))
    for tokens in (500, 5000, 25_000):
        assert times.seconds(tokens) == pytest.approx(fixed_s + tokens * per_token_s, rel=0.15)


def test_a_line_that_became_slower_is_noticed() -> None:
    times, rng = made(), random.Random(2)
    for n in range(350):
        tokens = rng.randrange(500, 30_000)
        slow = 1.0 if n < 200 else 5.0
        times.observe(report(0.02 + tokens * 4e-6 * slow, tokens))
    assert times.seconds(8000) == pytest.approx(0.02 + 8000 * 2e-5, rel=0.2)


def test_single_hand_overs_that_were_held_up_change_little() -> None:
    times = made()
    for n in range(100):
        times.observe(report(0.03 + n * 1e-5 + (2.0 if n % 20 == 19 else 0.0), 1000 + n))
    assert times.seconds(1000) < 0.06


def test_a_hand_over_counts_once_however_often_it_is_reported() -> None:
    times = made()
    assert times.observe(report(0.5, 1000))
    assert not times.observe(report(0.5, 1000))
    assert times.observe(report(0.5, 1000, worker="e"))
    times.remove("d")
    assert times.observe(report(0.5, 1000))
    assert times.samples == 3


@settings(deadline=None)
@given(samples=st.lists(st.tuples(st.floats(allow_nan=True), st.integers(-10, 10**12)), max_size=30))
def test_nothing_that_is_reported_makes_it_useless(samples: list[tuple[float, int]]) -> None:
    times = made()
    for took_s, tokens in [*samples, (nan, 1), (inf, 1), (-1.0, 1), (2 * MOST_S, 1), (1.0, -1)]:
        times.observe(report(took_s, tokens))
        assert 0 < times.seconds(0) < inf
        assert times.seconds(0) <= times.seconds(1000) < inf
