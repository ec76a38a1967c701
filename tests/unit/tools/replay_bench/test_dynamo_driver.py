"""Parts of the driver of Dynamo's selection core; whole it runs in `test_dynamo`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.tools.replay_bench.dynamo_driver import MARK, runs, signed, tokens_of

U64 = st.integers(0, (1 << 64) - 1)


@given(st.sets(U64, min_size=2))
def test_blocks_and_tokens_are_one_to_one(blocks: set[int]) -> None:
    spelled = {tuple(tokens_of(block, 512, mark)) for block in blocks for mark in (0, MARK)}
    assert len(spelled) == 2 * len(blocks)
    assert {len(tokens) for tokens in spelled} == {512}


@given(U64)
def test_a_signed_block_has_the_same_bits(block: int) -> None:
    assert signed(block).to_bytes(8, "big", signed=True) == block.to_bytes(8, "big")


@given(st.lists(st.integers(0, 30)), st.permutations(range(1, 31)))
def test_a_parent_is_never_behind_its_children(before: list[int], stored: list[int]) -> None:
    """Blocks 1 to 30 in any tree, stored in any order; 0 is no block."""
    parents = {block: (before[block] if block < len(before) else 0) % block or None for block in range(1, 31)}
    seen: list[int] = []
    for parent, run in runs(stored[:20], parents):
        assert parent is None or parent in seen or parent not in stored[:20]
        for block in run:
            assert parents[block] == parent
            parent = block
        seen += run
    assert sorted(seen) == sorted(stored[:20])
