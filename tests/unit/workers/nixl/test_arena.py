"""Memory by block."""

from __future__ import annotations

import pytest

from headrace.workers.nixl.arena import Arena
from headrace.workers.nixl.errors import BadBlocks


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
