"""Galloping: the end of a match from few looks, and where that is exact."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.index.types import TIERS, Overlap
from headrace.router.index.view import create_index
from tests.support.router.index_histories import TIER, WORKER
from tests.support.router.index_model import IMPLEMENTATIONS, ModelIndex, check_ends


def tree(turns: list[int]) -> list[int]:
    """Chain values of a prompt: those that begin alike share their first blocks, as long as they do."""
    value, chain = 0, []
    for turn in turns:
        value = (value * 31 + turn + 1) * 0x9E3779B97F4A7C15 % 2**64
        chain += [(value + n) % 2**64 for n in range(7)]
    return chain


FOREST = [tree([n >> 4 & 1, n >> 3 & 1, n >> 2 & 1, n >> 1 & 1, n & 1][: 1 + n % 5]) for n in range(32)]  # 7 to 35 blocks
TREE_STEP = st.tuples(
    st.sampled_from(["store", "store", "assume", "lose", "demote"]), WORKER, TIER, st.sampled_from(FOREST), st.integers(0, 34)
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(history=st.lists(TREE_STEP, max_size=40))
def test_galloping_is_exact_for_caches_without_holes(history: list[Any]) -> None:
    """Blocks are stored from the first on, and lost or moved to a lower tier together with all that stand behind them."""
    indexes, model = [create_index(name) for name in IMPLEMENTATIONS], ModelIndex()
    targets = (*indexes, model)
    for target in targets:
        for n in range(5):
            target.add_worker(f"w{n}")
    for name, worker, tier, chain, at in history:
        behind = {each for other in FOREST if other[: at + 1] == chain[: at + 1] for each in other[at:]}
        there = sorted(behind & set(model.blocks(worker, tier)))
        lower = TIERS[TIERS.index(tier) + 1 :]
        for target in targets:
            if name == "store":
                target.store(worker, tier, chain[:at])
            elif name == "assume":
                target.assume(worker, chain[:at])
            elif name == "demote" and lower:
                target.store(worker, lower[0], there)
                target.remove(worker, tier, there)
            else:
                for each in TIERS:
                    target.remove(worker, each, sorted(behind))
                target.unassume(worker, sorted(behind))
    for chain in [*FOREST[::3], [*FOREST[4], 1, 2, 3]]:
        for index in indexes:
            assert index.match(chain) == model.match(chain)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 120),
    pieces=st.lists(st.tuples(st.booleans(), WORKER, TIER, st.integers(0, 119), st.integers(0, 119)), max_size=40),
)
def test_galloping_over_holes_ends_where_both_sides_are_true(length: int, pieces: list[Any]) -> None:
    indexes, model = [create_index(name) for name in IMPLEMENTATIONS], ModelIndex()
    chain = [n * 0x9E3779B97F4A7C15 % 2**64 for n in range(length)]
    for n in range(5):
        for target in (*indexes, model):
            target.add_worker(f"w{n}")
            target.store(f"w{n}", "device", chain[: n * 25])
    for stores, worker, tier, low, high in pieces:
        for target in (*indexes, model):
            (target.store if stores else target.remove)(worker, tier, chain[low:high])
    found = indexes[0].match(chain)
    check_ends(found, model, chain)
    assert all(index.match(chain) == found for index in indexes)
    assert all(index.match_exact(chain) == model.match(chain) for index in indexes)


def test_galloping_trusts_what_lies_between(implementation: Any) -> None:
    """And that is all it trusts; who needs to know asks for every block."""
    index = create_index(implementation)
    index.add_worker("a")
    chain = list(range(1_000))
    index.store("a", "device", chain[:700])
    index.remove("a", "device", [3])
    assert index.match(chain) == {"a": Overlap(700)}
    assert index.match_exact(chain) == {"a": Overlap(3)}
    assert index.match_worker("a", chain) == Overlap(3)


class _Counted(list[int]):
    looked = 0

    def __getitem__(self, at: Any) -> Any:
        self.looked += 1
        return super().__getitem__(at)


def test_galloping_looks_at_few_blocks() -> None:
    index = create_index("pure")
    chain = _Counted(range(6_250))
    for name, blocks in (("a", 5_000), ("b", 77), ("c", 77)):
        index.add_worker(name)
        index.store(name, "device", range(blocks))
    assert index.match(chain) == {"a": Overlap(5_000), "b": Overlap(77), "c": Overlap(77)}
    assert chain.looked <= 50


def test_sets_that_are_free_are_not_found_when_workers_become_more(implementation: Any) -> None:
    index = create_index(implementation)
    for name in "ab":
        index.add_worker(name)
    index.store("a", "device", [1])
    index.remove("a", "device", [1])  # nobody is held by "a" alone now
    for n in range(70):
        index.add_worker(f"w{n}")
    index.store("a", "device", [2])
    index.store("b", "device", [3])
    assert index.match([2]) == {"a": Overlap(1)}
    assert index.match([3]) == {"b": Overlap(1)}
