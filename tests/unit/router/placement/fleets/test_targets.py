"""Targets as they arrive."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.placement.fleets.targets import MOST_TARGET_S, target_of


@pytest.mark.parametrize(
    ("asked", "target"), [(None, 2.0), (nan, 2.0), (0.0, 0.0), (-3.0, 0.0), (0.25, 0.25), (inf, MOST_TARGET_S), (-inf, 0.0)]
)
def test_a_target_is_clamped_to_what_can_be_and_zero_counts(asked: float | None, target: float) -> None:
    assert target_of(asked, 2.0) == target


@given(st.floats())
def test_any_number_becomes_a_finite_target(asked: float) -> None:
    assert 0.0 <= target_of(asked, 1.0) <= MOST_TARGET_S
