"""The distance of two kinds of times, and how often chance alone makes one so large."""

from __future__ import annotations

import random

import pytest

from benchmarks.tenant_timing import chance, distance


def test_times_that_lie_apart_are_as_far_apart_as_can_be() -> None:
    assert distance([1.0, 2.0, 3.0], [4.0, 5.0]) == distance([4.0, 5.0], [1.0, 2.0, 3.0]) == 1.0
    assert chance(1.0, 100, 100) < 1e-9


def test_equal_times_are_not_apart() -> None:
    assert distance([1.0, 1.0, 2.0], [1.0, 1.0, 2.0]) == 0.0
    assert chance(0.0, 100, 100) == 1.0


def test_the_largest_step_between_them_counts() -> None:
    assert distance([1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]) == pytest.approx(0.5)


def test_samples_of_one_distribution_seldom_look_apart() -> None:
    dice = random.Random(3)
    seldom = sum(
        chance(distance([dice.random() for _ in range(60)], [dice.random() for _ in range(60)]), 60, 60) < 0.05
        for _ in range(200)
    )
    assert 0 < seldom < 25


def test_the_known_values_of_the_limit_are_met() -> None:
    # 1.358 is the five percent point of Kolmogorov's distribution; with many values the correction for few is small.
    many = 10**8
    assert chance(1.3581 / (many / 2) ** 0.5, many, many) == pytest.approx(0.05, abs=0.001)
