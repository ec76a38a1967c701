"""What a worker has, block by block in parts, and what growth and change leave of it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.router.errors import UnknownWorker
from headrace.router.index.types import TIERS, Overlap
from headrace.router.index.view import create_index
from tests.support.router.index_histories import check
from tests.support.router.index_model import IMPLEMENTATIONS, ModelIndex, dumped


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


@pytest.mark.slow
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
