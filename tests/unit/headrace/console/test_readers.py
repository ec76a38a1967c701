"""The prefix map tells which worker was sent how much of which prefix, and what was cached there."""

from __future__ import annotations

from headrace.broker.messages import Routed
from headrace.console.readers import MAP_PREFIXES, prefix_map


def placed(worker: str, first: int, *, tokens: int = 100, uncached: int = 100) -> Routed:
    return Routed(at=1.0, id="r", worker=worker, tokens=tokens, uncached=uncached, hashes=first.to_bytes(8, "big") * 2)


def test_a_prefix_has_what_each_worker_was_sent() -> None:
    rows = prefix_map([(1, placed("a", 7)), (2, placed("a", 7, uncached=20)), (3, placed("b", 7)), (4, placed("b", 9))])
    assert rows[(7).to_bytes(8, "big").hex()] == {
        "tokens": 300, "cached": 80, "requests": 3, "workers": {"a": [2, 200, 80], "b": [1, 100, 0]},
    }  # fmt: skip
    assert len(rows) == 2


def test_prompts_below_a_block_are_left_out() -> None:
    assert prefix_map([(1, Routed(at=1.0, id="r", worker="a", tokens=3))]) == {}


def test_only_the_largest_prefixes_are_kept() -> None:
    rows = prefix_map([(n, placed("a", n, tokens=n)) for n in range(1, 200)])
    assert len(rows) == MAP_PREFIXES
    assert min(row["tokens"] for row in rows.values()) == 200 - MAP_PREFIXES
