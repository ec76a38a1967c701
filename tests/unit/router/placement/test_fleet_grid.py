"""Configurations of Dynamo's global router."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.router.errors import SettingsInvalid
from headrace.router.placement.fleet_grid import Axis, parse_grid, read_grid

AGG: dict[str, Any] = {
    "mode": "agg",
    "num_agg_pools": 3,
    "agg_pool_dynamo_namespaces": ["fast", "middle", "slow"],
    "agg_pool_selection_strategy": {
        "ttft_min_ms": 0,
        "ttft_max_ms": 3000,
        "ttft_resolution": 3,
        "itl_min_ms": 0,
        "itl_max_ms": 100,
        "itl_resolution": 2,
        "agg_pool_mapping": [[0, 0], [0, 1], [1, 2]],
        "priority_overrides": [
            {"min_priority": 5, "max_priority": 9, "target_pool": 0},
            {"min_priority": 9, "max_priority": 20, "target_pool": 2},
        ],
    },
}
DISAGG: dict[str, Any] = {
    "num_prefill_pools": 2,
    "num_decode_pools": 2,
    "prefill_pool_dynamo_namespaces": ["p0", "p1"],
    "decode_pool_dynamo_namespaces": ["d0", "d1"],
    "prefill_pool_selection_strategy": {
        "ttft_min": 0,
        "ttft_max": 1000,
        "ttft_resolution": 2,
        "isl_min": 0,
        "isl_max": 8000,
        "isl_resolution": 2,
        "prefill_pool_mapping": [[0, 1], [0, 0]],
    },
    "decode_pool_selection_strategy": {
        "itl_min": 0,
        "itl_max": 100,
        "itl_resolution": 2,
        "context_length_min": 0,
        "context_length_max": 8000,
        "context_length_resolution": 2,
        "decode_pool_mapping": [[0, 1], [1, 1]],
    },
}


def first(data: dict[str, Any], **asked: Any) -> str:
    values: dict[str, Any] = {"tokens": 100, "ttft_s": None, "itl_s": None, "priority": None, **asked}
    return parse_grid(data).order(**values)[0]


def test_a_cell_of_both_targets_names_the_fleet() -> None:
    assert first(AGG, ttft_s=0.5, itl_s=0.01) == "fast"
    assert first(AGG, ttft_s=2.5, itl_s=0.09) == "slow"
    assert first(AGG, ttft_s=2.5, itl_s=0.01) == "middle"
    assert first(AGG, ttft_s=99.0, itl_s=99.0) == "slow", "beyond the grid: its last cell"


def test_a_target_that_is_missing_is_the_middle_of_its_range_and_zero_is_not_missing() -> None:
    assert first(AGG) == "middle"
    assert first(AGG, ttft_s=0.0, itl_s=0.0) == "fast"


def test_the_first_override_that_covers_a_priority_wins_over_the_cell() -> None:
    assert first(AGG, ttft_s=2.5, itl_s=0.09, priority=9) == "fast"
    assert first(AGG, ttft_s=0.5, itl_s=0.01, priority=20) == "slow"
    assert first(AGG, ttft_s=2.5, itl_s=0.09, priority=4) == "slow"


def test_a_third_axis_of_prompt_lengths_comes_first() -> None:
    data = copy.deepcopy(AGG)
    data["agg_pool_selection_strategy"] |= {
        "isl_min": 0,
        "isl_max": 1000,
        "isl_resolution": 2,
        "agg_pool_mapping": [[[0, 0], [0, 0], [0, 0]], [[2, 2], [2, 2], [2, 2]]],
    }
    assert first(data, tokens=100) == "fast"
    assert first(data, tokens=900) == "slow"


def test_prefill_and_decode_have_grids_of_their_own_and_old_names_of_limits_are_read() -> None:
    grid = parse_grid(DISAGG)
    assert grid.prefill_fleet(tokens=100, ttft_s=0.9, itl_s=None, priority=None) == "p1"
    assert grid.prefill_fleet(tokens=7000, ttft_s=0.9, itl_s=None, priority=None) == "p0"
    assert grid.order(tokens=100, ttft_s=None, itl_s=0.01, priority=None)[0] == "d0"
    assert grid.order(tokens=7000, ttft_s=None, itl_s=0.01, priority=None)[0] == "d1"


def test_after_the_named_fleet_come_faster_ones_from_slowest_to_fastest() -> None:
    assert parse_grid(AGG).order(tokens=1, ttft_s=3.0, itl_s=0.1, priority=None) == ("slow", "middle", "fast")
    data = {**AGG, "agg_pool_priorities": [2, 0, 1]}
    assert parse_grid(data).order(tokens=1, ttft_s=3.0, itl_s=0.1, priority=None) == ("slow", "middle", "fast")
    assert parse_grid(data).order(tokens=1, ttft_s=0.0, itl_s=0.0, priority=None) == ("fast", "slow", "middle")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mode": "both"}, "mode must be disagg or agg, got 'both'"),
        ({"num_agg_pools": 2}, "num_agg_pools must be 3, as agg_pool_dynamo_namespaces has, got 2"),
        ({"agg_pool_priorities": [1, 2]}, r"agg_pool_priorities must be a list of 3 whole numbers, got \[1, 2\]"),
        ({"agg_pool_priorities": [1, 2, True]}, r"agg_pool_priorities\[2\] must be a whole number, got True"),
        ({"enable_priority_retry": 1}, "enable_priority_retry must be true or false, got 1"),
        ({"agg_pool_selection_strategy": None}, "agg_pool_selection_strategy must be an object, got None"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsInvalid, match=named):
        parse_grid({**AGG, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ttft_resolution": 0}, "ttft_resolution must be a whole number from 1 to 1000, got 0"),
        ({"ttft_max_ms": "x"}, "ttft_max_ms must be a number, got 'x'"),
        ({"itl_min_ms": 200}, "itl_min_ms must be below the most, 100, got 200"),
        ({"agg_pool_mapping": [[0, 0], [0, 1]]}, "agg_pool_mapping must be a list of 3, as ttft_resolution says"),
        ({"agg_pool_mapping": [[0, 0], [0, 1], [1]]}, r"agg_pool_mapping\[2\] must be a list of 2, as itl_resolution says"),
        (
            {"agg_pool_mapping": [[0, 0], [0, 3], [1, 2]]},
            r"agg_pool_mapping\[1\]\[1\] must be the number of a pool, 0 to 2, got 3",
        ),
        ({"priority_overrides": [{"min_priority": 2, "max_priority": 1, "target_pool": 0}]}, "at most max_priority, 1, got 2"),
        ({"priority_overrides": [{"min_priority": 1, "max_priority": 1, "target_pool": 3}]}, "target_pool must be the number"),
    ],
)
def test_a_wrong_value_of_a_strategy_is_named(change: dict[str, Any], named: str) -> None:
    data = copy.deepcopy(AGG)
    data["agg_pool_selection_strategy"] |= change
    with pytest.raises(SettingsInvalid, match=named):
        parse_grid(data)


def test_a_file_that_is_none_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match=r"no\.json cannot be read"):
        read_grid(str(tmp_path / "no.json"))
    (tmp_path / "grid.json").write_text("{")
    with pytest.raises(SettingsInvalid, match=r"grid\.json is no JSON"):
        read_grid(str(tmp_path / "grid.json"))
    (tmp_path / "grid.json").write_text(json.dumps(AGG))
    assert read_grid(str(tmp_path / "grid.json")).answers.pools == ("fast", "middle", "slow")


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 50))
def test_every_value_has_a_cell(value: float, cells: int) -> None:
    assert 0 <= Axis("ttft", 0.0, 100.0, cells).cell(value) < cells


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["agg", "disagg"]), st.sampled_from(sorted(AGG | DISAGG)), json_values)
def test_no_configuration_ends_in_anything_but_a_grid_or_a_named_error(mode: str, key: str, value: Any) -> None:
    data = {**copy.deepcopy(AGG if mode == "agg" else DISAGG), key: value}
    try:
        parse_grid(data)
    except SettingsInvalid:
        return


@given(st.sampled_from(sorted(AGG["agg_pool_selection_strategy"])), json_values)
def test_no_strategy_ends_in_anything_but_a_grid_or_a_named_error(key: str, value: Any) -> None:
    data = copy.deepcopy(AGG)
    data["agg_pool_selection_strategy"][key] = value
    try:
        grid = parse_grid(data)
    except SettingsInvalid:
        return
    assert grid.order(tokens=10, ttft_s=0.1, itl_s=None, priority=3)
