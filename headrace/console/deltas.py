"""Computes what has changed between two states of the console's tables, so that a tab is sent only that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]  # column → a value of JSON
Rows = Mapping[str, Row]  # id → row
Delta = dict[str, dict[str, Any] | None]  # id → the columns that changed; None: the row is gone


def changes(old: Rows, new: Rows) -> Delta:
    """Return what makes `new` of `old`. A column that a row no longer has is sent as null."""
    if old is new:
        return {}
    delta: Delta = {key: None for key in old if key not in new}
    for key, row in new.items():
        before = old.get(key)
        if before is None:
            delta[key] = dict(row)
        elif before != row:
            changed = {column: value for column, value in row.items() if column not in before or before[column] != value}
            changed |= {column: None for column in before if column not in row}
            delta[key] = changed
    return delta


def applied(old: Rows, delta: Delta) -> dict[str, dict[str, Any]]:
    """Return `old` with these changes, as a tab computes it."""
    rows = {key: dict(row) for key, row in old.items() if delta.get(key, row) is not None}
    for key, changed in delta.items():
        if changed is not None:
            rows[key] = {**rows.get(key, {}), **changed}
    return rows
