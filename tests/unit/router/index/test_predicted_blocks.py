"""What is assumed stays bounded by what is still assumed."""

from __future__ import annotations

from headrace.router.index.predicted_blocks import PredictedBlocks


def test_placing_the_same_blocks_for_long_takes_no_more_memory() -> None:
    assumed = PredictedBlocks(1e9)
    chain = list(range(1_000))
    for turn in range(500):
        assumed.place([*chain, 10_000 + turn % 3], float(turn))
    assert len(assumed) == 1_003
    assert assumed._named == sum(len(blocks) for _, _, blocks in assumed._placements)
    assert assumed._named <= 4 * 1_003 + 16_384 + 1_001
    assert sorted(assumed.expire(2e9)) == [*chain, 10_000, 10_001, 10_002]
    assert len(assumed) == assumed._named == 0


def test_confirmed_blocks_do_not_expire() -> None:
    assumed = PredictedBlocks(2.0)
    assert assumed.next_s() == float("inf")
    assumed.place([1, 2, 3], 0.0)
    assert sorted(assumed.confirm([2, 3, 4])) == [2, 3]
    assert assumed.next_s() == 2.0
    assert assumed.expire(1.9) == []
    assert assumed.expire(2.0) == [1]


def test_a_smaller_capacity_takes_tails_of_the_oldest_first() -> None:
    assumed = PredictedBlocks(100.0, capacity=10)
    assert assumed.place([1, 2, 3], 0.0) == []
    assert assumed.place([1, 4, 5, 6], 1.0) == []
    assumed.capacity = 3
    assert assumed.trim() == [3, 2, 6]
    assert sorted(assumed) == [1, 4, 5]
    assert assumed.place([7, 8, 9, 10], 2.0) == [5, 4, 1, 10]
