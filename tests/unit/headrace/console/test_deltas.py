"""What a tab computes from changes is the state that they were made from."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.console.deltas import applied, changes

ROWS = st.dictionaries(
    st.sampled_from("abcd"),
    st.dictionaries(st.sampled_from("xyz"), st.integers(0, 2) | st.text(max_size=2), min_size=1),
    max_size=4,
)


def without_nulls(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {key: {name: value for name, value in row.items() if value is not None} for key, row in rows.items()}


@given(ROWS, ROWS)
def test_a_tab_that_applies_the_changes_has_the_new_state(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert without_nulls(applied(old, changes(old, new))) == new


@given(ROWS)
def test_what_has_not_changed_is_not_sent(rows: dict[str, Any]) -> None:
    assert changes(rows, {key: dict(row) for key, row in rows.items()}) == {}


def test_only_the_columns_that_changed_are_sent() -> None:
    old = {"w1": {"state": "serving", "running": 3}, "w2": {"state": "serving", "running": 0}}
    new = {"w1": {"state": "serving", "running": 4}, "w3": {"state": "serving", "running": 0}}
    assert changes(old, new) == {"w1": {"running": 4}, "w2": None, "w3": {"state": "serving", "running": 0}}
