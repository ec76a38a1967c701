"""Files that take long come first, so that the other processes do not wait for the last one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support import process_shares

ROOT = Path(__file__).resolve().parents[2]


def names(*node_ids: str) -> list[str]:
    items: Any = [SimpleNamespace(nodeid=node_id) for node_id in node_ids]
    return [item.nodeid for item in process_shares.ordered(items)]


def test_what_waits_longest_is_begun_before_all_else_and_the_rest_keeps_its_order() -> None:
    (early,) = process_shares.EARLY
    others = ["tests/integration/z.py::test_b", "tests/integration/z.py::test_a", "tests/unit/a.py::test_a"]
    assert names(*others, f"{early}::test_it") == [f"{early}::test_it", *others]


def test_every_file_that_is_named_exists() -> None:
    shares = (*process_shares.FIRST, *process_shares.LAST, *process_shares.BENCH)
    files = [*process_shares.EARLY, *(f"{process_shares.ENGINES}{name}" for name in shares)]
    assert not [name for name in files if not (ROOT / name).exists()]
