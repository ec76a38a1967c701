"""Memory by block."""

from __future__ import annotations

import pytest

from headrace.workers.sim.transfer.nixl.arena import Arena
from headrace.workers.sim.transfer.nixl.errors import BadBlocks


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
