"""Pairs of blocks: none lost, none invented, as few runs as possible, parts within their bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.workers.nixl.descriptors import Arena, BadBlocks, cut, indices, pair, run_starts

BLOCKS = 64


def chains(pairs: set[tuple[int, int]]) -> int:
    """How many runs there are, found the slow way."""
    return sum((local - 1, remote - 1) not in pairs for local, remote in pairs)


@st.composite
def many_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Distinct blocks on both sides, in stretches that rise, fall or scatter."""
    local: list[int] = []
    remote: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        a, b, length = draw(st.integers(0, BLOCKS - 1)), draw(st.integers(0, BLOCKS - 1)), draw(st.integers(1, 12))
        for step in range(length):
            if a + step < BLOCKS and b + step < BLOCKS and a + step not in local and b + step not in remote:
                local.append(a + step)
                remote.append(b + step)
    order = (
        draw(st.permutations(range(len(local))))
        if draw(st.booleans())
        else list(range(len(local)))[:: draw(st.sampled_from((1, -1)))]
    )
    return [local[n] for n in order], [remote[n] for n in order]


def prepared(local: list[int], remote: list[int], into: str = "local") -> tuple[np.ndarray, np.ndarray]:
    return pair(indices(local, BLOCKS, "local"), indices(remote, BLOCKS, "remote"), into=into)  # type: ignore[arg-type]


@settings(deadline=None)
@given(many_pairs(), st.sampled_from(("local", "remote")))
def test_pairs_are_kept_and_in_as_few_runs_as_there_can_be(blocks: tuple[list[int], list[int]], into: str) -> None:
    local, remote = prepared(*blocks, into)
    pairs = set(zip(*blocks, strict=True))
    assert sorted(zip(local.tolist(), remote.tolist(), strict=True)) == sorted(pairs)
    assert len(run_starts(local, remote)) == chains(pairs)


@settings(deadline=None)
@given(many_pairs(), st.integers(1, 9), st.integers(1, 5))
def test_parts_hold_everything_once_within_their_bounds(blocks: tuple[list[int], list[int]], most: int, runs: int) -> None:
    local, remote = prepared(*blocks)
    parts = cut(local, remote, block_bytes=100, part_bytes=most * 100 + 99, part_runs=runs)
    assert np.concatenate([part.local for part in parts]).tolist() == local.tolist()
    assert np.concatenate([part.remote for part in parts]).tolist() == remote.tolist()
    for part in parts:
        assert 1 <= len(part.local) <= most
        assert 1 <= part.runs <= runs
        assert part.runs == len(run_starts(part.local, part.remote))


@settings(deadline=None)
@given(many_pairs(), st.integers(1, 9), st.integers(1, 5))
def test_a_part_ends_only_where_a_bound_makes_it(blocks: tuple[list[int], list[int]], most: int, runs: int) -> None:
    local, remote = prepared(*blocks)
    parts = cut(local, remote, block_bytes=1, part_bytes=most, part_runs=runs)
    for part, following in itertools.pairwise(parts):
        starts_run = following.local[0] != part.local[-1] + 1 or following.remote[0] != part.remote[-1] + 1
        assert len(part.local) == most or (part.runs == runs and starts_run)


def test_falling_blocks_are_one_run() -> None:
    local, remote = prepared([9, 8, 7, 6], [29, 28, 27, 26])
    assert len(run_starts(local, remote)) == 1


def test_a_block_larger_than_a_part_is_a_part() -> None:
    parts = cut(*prepared([0, 1], [0, 1]), block_bytes=1000, part_bytes=10)
    assert [len(part.local) for part in parts] == [1, 1]


@pytest.mark.parametrize("blocks", [[BLOCKS], [-1], [0, BLOCKS + 7], [1 << 40], [1 << 70], [[1, 2]], ["x"]])
def test_a_number_that_names_no_block_is_refused(blocks: list[int]) -> None:
    with pytest.raises(BadBlocks):
        indices(blocks, BLOCKS, "local")


@pytest.mark.parametrize(
    ("local", "remote", "into"),
    [
        ([1, 2], [3], "local"),
        ([], [], "local"),
        ([1, 1], [2, 3], "local"),
        ([1, 5, 1], [2, 3, 4], "local"),
        ([1, 2], [3, 3], "remote"),
    ],
)
def test_sides_that_do_not_pair_up_are_refused(local: list[int], remote: list[int], into: str) -> None:
    with pytest.raises(BadBlocks):
        prepared(local, remote, into)


def test_one_block_may_be_copied_to_several_places() -> None:
    local, remote = prepared([1, 2], [5, 5])
    assert (local.tolist(), remote.tolist()) == ([1, 2], [5, 5])


def test_blocks_are_apart_writable_and_cover_the_arena() -> None:
    arena = Arena(4, 100)
    for block in range(4):
        arena.view(block)[:] = block + 1
    assert [set(arena.view(block).tolist()) for block in range(4)] == [{1}, {2}, {3}, {4}]
    assert arena.view(1).ctypes.data == arena.address + 100
    assert arena.size == 400


@pytest.mark.parametrize("block", [-1, 4])
def test_there_is_no_view_outside(block: int) -> None:
    with pytest.raises(BadBlocks, match=str(block)):
        Arena(4, 100).view(block)


@pytest.mark.parametrize(("blocks", "size"), [(0, 100), (4, 0), (-1, 100)])
def test_an_empty_arena_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(BadBlocks):
        Arena(blocks, size)


def test_bytes_are_read_as_they_were_written_and_nothing_beside_them_changes() -> None:
    arena = Arena(4, 100)
    arena.write(1, b"x" * 150)
    assert (arena.read(0, 400)) == b"\0" * 100 + b"x" * 150 + b"\0" * 150
    assert (arena.read(1, 150), arena.read(3, 0)) == (b"x" * 150, b"")


@pytest.mark.parametrize(("first", "size"), [(-1, 1), (3, 101), (0, 401), (5, 0), (0, -1)])
def test_no_bytes_lie_outside(first: int, size: int) -> None:
    with pytest.raises(BadBlocks, match="do not lie in"):
        Arena(4, 100).read(first, size)
