"""What may happen to an index, and a comparison with the model of it."""

from __future__ import annotations

from array import array

from hypothesis import strategies as st

from headrace.router.index.types import TIERS, BlockTable
from tests.support.router.index_model import ModelIndex, check_ends, dumped

# few values, so that they meet; 0 and the largest u64 are legal, and some differ only in bits that a careless hash drops
VALUES = [0, 1, 2, 3, 2**64 - 1, 2**63, 1 << 32, 1 << 56, 5 << 56, *(n << 40 for n in range(1, 12)), *range(100, 140)]
BLOCKS = st.lists(st.sampled_from(VALUES), max_size=12)
WORKER = st.sampled_from([f"w{n}" for n in range(5)])
TIER = st.sampled_from(TIERS)
STEP = st.one_of(
    st.tuples(st.just("store"), WORKER, TIER, BLOCKS),
    st.tuples(st.just("store"), WORKER, st.just("device"), BLOCKS),
    st.tuples(st.just("remove"), WORKER, TIER, BLOCKS),
    st.tuples(st.just("assume"), WORKER, BLOCKS),
    st.tuples(st.just("unassume"), WORKER, BLOCKS),
    st.tuples(st.just("clear"), WORKER),
    st.tuples(st.just("drop_worker"), WORKER),
    st.tuples(st.just("add_worker"), WORKER),
)


def check(index: BlockTable, model: ModelIndex, chains: list[list[int]]) -> None:
    assert set(index.workers()) == model.names
    for chain in chains:
        every_other = memoryview(array("Q", [each for value in chain for each in (value, 7)]))[::2]
        found = index.match(chain)
        check_ends(found, model, chain)
        for form in (chain, array("Q", chain), memoryview(array("Q", chain)), every_other, tuple(chain)):
            assert index.match_exact(form) == model.match(chain)
            assert index.match(form) == found
    for worker in model.names:
        for tier in TIERS:
            parts = list(index.iter_blocks(worker, tier, 3))
            assert sorted(memoryview(b"".join(parts)).cast("Q")) == model.blocks(worker, tier)
            assert max(map(len, parts), default=0) <= 3 * 8
            assert dumped(index, worker, tier) == model.blocks(worker, tier)
        assert index.count(worker) == sum(len(model.blocks(worker, tier)) for tier in TIERS)
        for chain in chains:
            assert index.match_worker(worker, chain) == model.match_worker(worker, chain)
    assert index.assumed == sum(plane == 3 for _, plane, _ in model.entries)
    assert len(index) == len(model.entries) - index.assumed
