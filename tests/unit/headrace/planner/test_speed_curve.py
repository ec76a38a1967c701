from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planner.speed_curve import LEAST_SAMPLES, Speed, SpeedCurve

TRUTH = Speed(base_s=0.015, prefill_s=5e-5, decode_s=4e-4, context_s=2e-8)


def learn(curve: SpeedCurve, truth: Speed, count: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        tokens = rng.choice((0, 0, rng.randrange(8192)))
        decodes = rng.randrange(1, 64)
        context = decodes * rng.randrange(100, 20_000)
        step = truth.base_s + tokens * truth.prefill_s + decodes * truth.decode_s + context * truth.context_s
        curve.learn(step * rng.uniform(0.97, 1.03), prefill_tokens=tokens, decodes=decodes, context_tokens=context)


def test_the_curve_is_learnt_from_steps() -> None:
    curve = SpeedCurve()
    learn(curve, TRUTH, 300)
    found = curve.speed()
    assert found.prefill_s == pytest.approx(TRUTH.prefill_s, rel=0.1)
    assert found.step_s(32, 8000) == pytest.approx(TRUTH.step_s(32, 8000), rel=0.1)


def test_nothing_is_derived_from_a_handful_of_steps_unless_a_profile_seeds_the_curve() -> None:
    curve = SpeedCurve()
    learn(curve, TRUTH, LEAST_SAMPLES - 1)
    assert not curve.known
    seeded = SpeedCurve(TRUTH)
    assert seeded.known
    assert seeded.speed() == TRUTH


def test_an_engine_that_became_slower_is_learnt_anew() -> None:
    curve = SpeedCurve()
    learn(curve, TRUTH, 300)
    learn(curve, Speed(base_s=0.03, prefill_s=1e-4, decode_s=8e-4, context_s=4e-8), 1500, seed=2)
    assert curve.speed().step_s(32, 8000) == pytest.approx(2 * TRUTH.step_s(32, 8000), rel=0.1)


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_without_a_time_teaches_nothing(step_s: float) -> None:
    curve = SpeedCurve()
    assert not curve.learn(step_s, prefill_tokens=100, decodes=1, context_tokens=0)
    assert not curve.learn(0.01, prefill_tokens=0, decodes=0, context_tokens=0)
    assert curve.samples == 0


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(1e-5, 100), st.integers(0, 10**6), st.integers(0, 4096), st.integers(0, 10**8)),
        max_size=60,
    )
)
def test_no_sample_makes_a_speed_that_cannot_be(samples: list[tuple[float, int, int, int]]) -> None:
    curve = SpeedCurve()
    for step_s, tokens, decodes, context in samples:
        curve.learn(step_s, prefill_tokens=tokens, decodes=decodes, context_tokens=context)
    found = curve.speed()
    assert 0 < found.base_s < float("inf")
    assert 0 < found.prefill_s < float("inf")
    assert 0 < found.decode_s < float("inf")
    assert 0 <= found.context_s < float("inf")


def test_a_stored_curve_is_the_same_and_a_broken_one_is_refused() -> None:
    curve = SpeedCurve()
    learn(curve, TRUTH, 100)
    stored = curve.dump()
    again = SpeedCurve()
    assert again.load(stored["gram"], stored["right"], stored["samples"])  # type: ignore[arg-type]
    assert again.speed() == curve.speed()
    assert not again.load([1.0], [1.0], 3)
