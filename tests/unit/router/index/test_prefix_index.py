"""Both indexes, pure and compiled, against the model, after any history."""

from __future__ import annotations

import random
import sys
import types
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import SettingsInvalid, UnknownWorker
from router.index import create as create_module
from router.index.create import create_index
from router.index.table import BlockTable
from router.index.types import TIERS, Overlap
from tests.unit.router.index.model import IMPLEMENTATIONS, ModelIndex, dumped

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


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Any:
    return request.param


def check(index: BlockTable, model: ModelIndex, chains: list[list[int]]) -> None:
    assert set(index.workers()) == model.names
    for chain in chains:
        assert index.match(chain) == model.match(chain)
        assert index.match(array("Q", chain)) == model.match(chain)
        assert index.match(memoryview(array("Q", chain))) == model.match(chain)
        assert index.match(memoryview(array("Q", [each for value in chain for each in (value, 7)]))[::2]) == model.match(chain)
        assert index.match(tuple(chain)) == model.match(chain)
    for worker in model.names:
        for tier in TIERS:
            assert dumped(index, worker, tier) == model.blocks(worker, tier)
        assert index.count(worker) == sum(len(model.blocks(worker, tier)) for tier in TIERS)
        for chain in chains:
            assert index.match_worker(worker, chain) == model.match_worker(worker, chain)
    assert index.assumed == sum(plane == 3 for _, plane, _ in model.entries)
    assert len(index) == len(model.entries) - index.assumed


@settings(max_examples=150, deadline=None, derandomize=True)
@given(history=st.lists(STEP, max_size=40), chains=st.lists(BLOCKS, min_size=1, max_size=3))
def test_any_history_is_answered_like_the_model(history: list[Any], chains: list[list[int]]) -> None:
    indexes, model = [create_index(name) for name in IMPLEMENTATIONS], ModelIndex()
    for name, worker, *arguments in history:
        if worker in model.names or name in ("add_worker", "drop_worker"):
            for target in (*indexes, model):
                getattr(target, name)(worker, *arguments)
        else:
            for index in indexes:
                with pytest.raises(UnknownWorker, match=worker):
                    getattr(index, name)(worker, *arguments)
    for index in indexes:
        check(index, model, chains)


def test_many_blocks_and_hundreds_of_workers(implementation: Any) -> None:
    rng = random.Random(7)
    index, model = create_index(implementation), ModelIndex()
    shared = [rng.getrandbits(64) for _ in range(30)]
    chains = []
    for n in range(140):  # more than two words of 64 hold
        for target in (index, model):
            target.add_worker(f"w{n}")
        chain = shared[: rng.randrange(31)] + [rng.getrandbits(64) for _ in range(10)]
        chains.append(chain)
        for tier in rng.sample(TIERS, 2):
            part = chain[: rng.randrange(len(chain))]
            for target in (index, model):
                target.store(f"w{n}", tier, part)
    check(index, model, rng.sample(chains, 2))
    for n in rng.sample(range(140), 70):
        for target in (index, model):
            target.drop_worker(f"w{n}")
    for target in (index, model):
        target.add_worker("late")  # takes a slot that another had
        target.store("late", "device", shared)
    check(index, model, rng.sample(chains, 2))


def test_more_workers_later_change_nothing_for_the_first(implementation: Any) -> None:
    index, model = create_index(implementation), ModelIndex()

    def both(name: str, *arguments: Any) -> None:
        getattr(index, name)(*arguments)
        getattr(model, name)(*arguments)

    for n in range(60):
        both("add_worker", f"w{n}")
    for n in range(60):  # sets of one and of two workers
        both("store", f"w{n}", "device", [n, n + 1, 500 + n])
    for n in range(0, 60, 3):
        both("drop_worker", f"w{n}")
    for n in range(100, 250):
        both("add_worker", f"w{n}")
    for n in range(60):
        if n % 3:
            both("store", f"w{n}", "device", [n, n + 1, 500 + n])  # it has them
    for n in range(100, 250):
        both("store", f"w{n}", "device", [n % 60, 1_000 + n])
    check(index, model, [[n] for n in range(0, 60, 12)])


def test_growth_and_shrinking_lose_nothing(implementation: Any) -> None:
    rng = random.Random(3)
    index = create_index(implementation)
    index.add_worker("a")
    index.add_worker("b")
    blocks = [rng.getrandbits(64) for _ in range(60_000)]
    index.store("a", "device", blocks)
    index.store("b", "host", blocks[:20_000])
    rng.shuffle(blocks)
    gone, kept = blocks[:59_000], blocks[59_000:]
    full = index.nbytes
    for start in range(0, len(gone), 100):
        index.remove("a", "device", gone[start : start + 100])
    assert dumped(index, "a", "device") == sorted(kept)
    assert index.match_worker("a", kept) == Overlap(len(kept))
    index.clear("b")
    assert index.count("b") == 0
    assert len(index) == len(kept)
    if implementation == "compiled":
        assert index.nbytes < full / 2


def test_blocks_that_come_and_go_do_not_pile_up(implementation: Any) -> None:
    index = create_index(implementation)
    index.add_worker("a")
    for turn in range(400):
        index.store("a", "device", range(turn * 50, turn * 50 + 50))
        index.remove("a", "device", range(max(0, turn * 50 - 50), turn * 50))
    assert dumped(index, "a", "device") == list(range(399 * 50, 400 * 50))
    assert index.nbytes < 200_000


def test_moving_tiers(implementation: Any) -> None:
    index = create_index(implementation)
    index.add_worker("a")
    chain = list(range(10))
    index.store("a", "device", chain)
    index.store("a", "host", chain[4:])
    index.remove("a", "device", chain[4:])
    index.store("a", "disk", chain[8:])
    index.remove("a", "host", chain[8:])
    assert index.match(chain) == {"a": Overlap(4, 4, 2)}
    index.assume("a", [4])
    assert index.match(chain) == {"a": Overlap(5, 3, 2)}
    assert dumped(index, "a", "device") == [0, 1, 2, 3]  # what is assumed is never dumped
    assert index.count("a") == 10


@pytest.mark.parametrize("bad", [[1, -1], [1, 2**64], [1, "x"], [1.5]])
def test_what_is_no_u64_is_refused(bad: list[Any]) -> None:
    if "compiled" not in IMPLEMENTATIONS:
        pytest.skip("the compiled index was not built")
    index = create_index("compiled")
    index.add_worker("a")
    with pytest.raises((OverflowError, TypeError)):
        index.store("a", "device", bad)
    index.store("a", "device", [7])
    assert index.match([7]) == {"a": Overlap(1)}


def test_bytes_are_the_numbers_that_they_are(implementation: Any) -> None:
    index = create_index(implementation)
    index.add_worker("a")
    index.store("a", "device", b"\x01\x02")  # a sequence of int like any other
    assert dumped(index, "a", "device") == [1, 2]


def test_unknown_tier_is_named(implementation: Any) -> None:
    index = create_index(implementation)
    index.add_worker("a")
    with pytest.raises(ValueError, match="'tape'"):
        index.store("a", "tape", [1])  # type: ignore[arg-type]


# -- a limit ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    history=st.lists(st.tuples(WORKER, TIER, st.lists(st.integers(0, 400), max_size=30)), max_size=40),
    limit=st.integers(1, 120),
    chain=st.lists(st.integers(0, 400), max_size=20),
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
            index.match(chain)
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
        index.match(hot)
    assert len(index) <= 4_000
    assert index.evicted >= 16_000
    assert index.match_worker("a", hot) == Overlap(200)
    assert index.match_worker("a", cold) == Overlap(0)


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


# -- which one runs ----------------------------------------------------------------------------------------------------


def test_pure_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_index("pure").implementation == "pure"
    monkeypatch.setenv(create_module.IMPLEMENTATION_VARIABLE, "pure")
    assert create_index().implementation == "pure"


@pytest.mark.parametrize("wrong", ["fast", "PURE"])
def test_other_names_are_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    with pytest.raises(SettingsInvalid, match=wrong):
        create_index(wrong)  # type: ignore[arg-type]
    monkeypatch.setenv(create_module.IMPLEMENTATION_VARIABLE, wrong)
    with pytest.raises(SettingsInvalid, match=wrong):
        create_index()


def test_negative_limit_is_refused() -> None:
    with pytest.raises(SettingsInvalid, match="-1"):
        create_index(max_entries=-1)


class _Mismatched(types.ModuleType):
    """What is left of an extension whose parts were built at different times."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("Holders size changed")


@pytest.mark.parametrize("module", [None, _Mismatched("router.index._table")], ids=["absent", "mismatched"])
def test_without_the_extension_the_pure_one_runs(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    monkeypatch.setitem(sys.modules, "router.index._table", module)
    assert create_index().implementation == "pure"
    with pytest.raises(SettingsInvalid, match="not built"):
        create_index("compiled")
