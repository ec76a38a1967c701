"""Both indexes, pure and compiled, against the model, after any history."""

from __future__ import annotations

import random
import sys
import types
from array import array
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.errors import SettingsInvalid, UnknownWorker
from router.index import create as create_module
from router.index.create import create_index
from router.index.table import BlockTable
from router.index.types import TIERS, Overlap
from tests.unit.router.index.model import IMPLEMENTATIONS, ModelIndex, check_ends, dumped

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
    for chain in chains:
        assert all(index.match(chain) == indexes[0].match(chain) for index in indexes)


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


# -- in parts ----------------------------------------------------------------------------------------------------------


def test_blocks_in_parts_after_many_came_and_went(implementation: Any) -> None:
    rng = random.Random(2)
    index = create_index(implementation)
    index.add_worker("a")
    index.add_worker("b")
    blocks = [0, *(rng.getrandbits(64) for _ in range(20_000))]
    index.store("a", "device", blocks)
    index.store("b", "device", blocks[:5_000])
    index.remove("a", "device", blocks[:8_000])  # not so many that they are tidied up
    index.store("a", "device", blocks[:2_000])  # again
    index.store("a", "host", blocks[1_000:3_000])
    parts = list(index.iter_blocks("a", "device", 1_000))
    assert max(map(len, parts)) <= 8_000
    kept = sorted(blocks[:2_000] + blocks[8_000:])
    assert sorted(memoryview(b"".join(parts)).cast("Q")) == kept
    assert sorted(memoryview(b"".join(index.iter_blocks("a", "host", 7))).cast("Q")) == sorted(blocks[1_000:3_000])
    assert not any(index.iter_blocks("b", "disk", 1_000))
    assert dumped(index, "a", "device") == kept


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.store("a", "device", [1_000]),
        lambda index: index.remove("a", "device", [5]),
        lambda index: (index.store("a", "device", [1_000]), index.remove("a", "device", [5])),
        lambda index: index.store("a", "host", [1]),
        lambda index: index.clear("a"),
        lambda index: (index.drop_worker("a"), index.add_worker("a"), index.store("a", "device", range(100))),
    ],
)
def test_parts_of_what_does_not_hold_still(implementation: Any, change: Any) -> None:
    index = create_index(implementation)
    index.add_worker("a")
    index.store("a", "device", list(range(100)))
    parts = index.iter_blocks("a", "device", 10)
    next(parts)
    change(index)
    with pytest.raises(RuntimeError, match="changed"):
        list(parts)


def test_others_and_assumptions_do_not_disturb_the_parts(implementation: Any) -> None:
    index = create_index(implementation)
    index.add_worker("a")
    index.store("a", "device", list(range(100)))
    parts = index.iter_blocks("a", "device", 10)
    first = next(parts)
    for n in range(100):  # more than there was room for
        index.add_worker(f"w{n}")
        index.store(f"w{n}", "device", list(range(n, 5_000, 100)))
    index.drop_worker("w7")
    index.assume("a", range(50, 5_000))
    index.unassume("a", range(60, 70))
    index.store("a", "device", range(100))  # it has them
    assert sorted(memoryview(first + b"".join(parts)).cast("Q")) == list(range(100))


def test_parts_while_the_worker_is_tidied_up(implementation: Any) -> None:
    """What was lost is forgotten at some time, which moves the rest: none may be left out for it, nor come twice."""
    index = create_index(implementation)
    index.add_worker("a")
    index.store("a", "device", list(range(1_000)))
    index.remove("a", "device", list(range(0, 1_000, 5)) + list(range(900)))
    kept = [n for n in range(900, 1_000) if n % 5]
    parts = index.iter_blocks("a", "device", 10)
    got = next(parts)
    index.assume("a", range(5_000, 7_000))
    try:
        got += b"".join(parts)
    except RuntimeError:
        got = b"".join(index.iter_blocks("a", "device", 10))
    assert sorted(memoryview(got).cast("Q")) == kept


def test_parts_that_cannot_be(implementation: Any) -> None:
    index = create_index(implementation)
    with pytest.raises(UnknownWorker, match="nobody"):
        list(index.iter_blocks("nobody", "device", 10))
    index.add_worker("a")
    index.store("a", "device", [1])
    with pytest.raises(ValueError, match="parts of 0"):
        list(index.iter_blocks("a", "device", 0))
    with pytest.raises(ValueError, match="'tape'"):
        list(index.iter_blocks("a", "tape", 1))  # type: ignore[arg-type]


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
