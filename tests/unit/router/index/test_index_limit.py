"""An index with a limit: what is used stays, and answers are never wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.router.index.types import Overlap
from headrace.router.index.view import create_index
from tests.support.router.index_histories import TIER, WORKER, check
from tests.support.router.index_model import IMPLEMENTATIONS, ModelIndex, dumped


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    history=st.lists(st.tuples(WORKER, TIER, st.lists(st.integers(0, 400), max_size=30)), max_size=40),
    limit=st.integers(1, 120),
    chain=st.lists(st.integers(0, 400), max_size=20),
)
@example(  # so few entries that one sample of the table meets a block twice
    history=[("w0", "device", [3, 4, 233]), ("w0", "device", [0, 1, 2])], limit=3, chain=[]
)
def test_with_a_limit_answers_are_never_wrong(history: list[Any], limit: int, chain: list[int]) -> None:
    for name in IMPLEMENTATIONS:
        model = ModelIndex()
        evicted: list[int] = []
        index = create_index(name, max_entries=limit, on_evict=evicted.extend)
        count = 0
        for worker, tier, blocks in history:
            evicted.clear()
            index.add_worker(worker)
            model.add_worker(worker)
            index.store(worker, tier, blocks)
            model.store(worker, tier, blocks)
            model.evict(evicted)
            count += len(evicted)
            assert len(index) <= limit
            index.match_exact(chain)
        assert index.evicted == count
        check(index, model, [chain])


def test_what_is_used_stays_and_tails_go_first(implementation: Any) -> None:
    rng = random.Random(11)
    index = create_index(implementation, max_entries=4_000)
    index.add_worker("a")
    hot = [rng.getrandbits(64) for _ in range(200)]
    cold = [rng.getrandbits(64) for _ in range(200)]
    index.store("a", "device", hot)
    index.store("a", "device", cold)
    for _ in range(200):
        index.store("a", "device", [rng.getrandbits(64) for _ in range(100)])
        index.match_exact(hot)
    assert len(index) <= 4_000
    assert index.evicted >= 16_000
    assert index.match_worker("a", hot) == Overlap(200)
    assert index.match_worker("a", cold) == Overlap(0)


def test_galloping_is_no_use_of_blocks(implementation: Any) -> None:
    """It would make those young that it happens to look at, and leave holes when the others go."""
    evicted: list[list[int]] = []
    for gallops in (False, True):
        rng = random.Random(12)
        gone: list[int] = []
        index = create_index(implementation, max_entries=2_000, on_evict=gone.extend)
        index.add_worker("a")
        hot = [rng.getrandbits(64) for _ in range(200)]
        index.store("a", "device", hot)
        for _ in range(40):
            index.store("a", "device", [rng.getrandbits(64) for _ in range(100)])
            if gallops:
                index.match(hot)
        evicted.append(gone)
    assert evicted[0] == evicted[1]
    assert evicted[0]


@pytest.mark.slow
def test_one_store_beyond_the_limit(implementation: Any) -> None:
    index = create_index(implementation, max_entries=1_000)
    index.add_worker("a")
    index.store("a", "device", list(range(300_000)))
    assert len(index) <= 1_000
    assert len(dumped(index, "a", "device")) == len(index) == index.count("a")
    assert index.nbytes < 40_000_000
    assert index.evicted == 300_000 - len(index)


def test_a_chain_longer_than_the_limit_keeps_its_head() -> None:
    index = create_index("pure", max_entries=320)
    index.add_worker("a")
    index.store("a", "device", list(range(320)))
    index.store("a", "device", [1_000])
    assert index.match_worker("a", list(range(320))) == Overlap(309)
