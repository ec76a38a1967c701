"""What is learnt of the errors of predictions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.placement.first_tokens.medians import MOST_FACTOR, Medians, bucket_of

BUCKET = bucket_of("a", 100, "idle")


def test_an_error_that_keeps_its_size_is_learnt_of_its_own_bucket_alone() -> None:
    medians = Medians()
    for _ in range(60):
        medians.observe(BUCKET, predicted_s=1.0, measured_s=1.5)
    assert medians.factor(BUCKET) == pytest.approx(1.5, rel=0.05)
    assert medians.factor(BUCKET._replace(state="filling")) == 1.0
    assert medians.factor(BUCKET._replace(fleet="b")) == 1.0
    assert medians.factor(bucket_of("a", 100_000, "idle")) == 1.0


def test_a_median_is_learnt_and_no_mean() -> None:
    medians, rng = Medians(), random.Random(1)
    for _ in range(2000):
        medians.observe(BUCKET, predicted_s=1.0, measured_s=100.0 if rng.random() < 0.2 else 1.1)
    assert medians.factor(BUCKET) == pytest.approx(1.1, rel=0.15)


times = st.floats() | st.sampled_from([0.0, -1.0, float("inf"), float("nan"), 1e-300, 1e300])


@given(st.lists(st.tuples(times, times), max_size=60))
def test_whatever_is_measured_a_factor_stays_within_its_bounds(seen: list[tuple[float, float]]) -> None:
    medians = Medians()
    for predicted_s, measured_s in seen:
        medians.observe(BUCKET, predicted_s=predicted_s, measured_s=measured_s)
    assert 1 / MOST_FACTOR - 1e-9 <= medians.factor(BUCKET) <= MOST_FACTOR + 1e-9
