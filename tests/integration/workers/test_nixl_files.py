"""A file of blocks over NIXL's POSIX plugin."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.sim.transfer.nixl.arena import Arena
from headrace.workers.sim.transfer.nixl.errors import BadBlocks, Closed
from headrace.workers.sim.transfer.nixl.files import BlockFile
from headrace.workers.sim.transfer.nixl.transfer import Transfer
from tests.support.nixl_peer import fill, needs_nixl, sums

pytestmark = [needs_nixl, pytest.mark.slow]

BLOCKS = 64
PLACES = 150
BLOCK_BYTES = 20_000


@pytest.fixture
def arena() -> Arena:
    arena = Arena(BLOCKS, BLOCK_BYTES)
    fill(arena, seed=3)
    return arena


@pytest.fixture
def file(tmp_path: Path, arena: Arena) -> Iterator[BlockFile]:
    file = BlockFile(tmp_path / "blocks", arena, blocks=PLACES)
    yield file
    file.close()


def drive(file: BlockFile) -> list[Transfer]:
    ended: list[Transfer] = []
    until_s = time.monotonic() + 60
    while file.active:
        assert time.monotonic() < until_s, "a transfer did not end"
        ended += file.poll()
        time.sleep(0)
    return ended


@pytest.mark.parametrize("order", ["random", "contiguous"])
def test_blocks_come_back_as_they_were_stored(file: BlockFile, arena: Arena, order: str) -> None:
    places = random.sample(range(PLACES), BLOCKS) if order == "random" else list(range(40, 40 + BLOCKS))
    before = sums(arena)
    stored = file.store(range(BLOCKS), places)
    assert drive(file) == [stored]
    fill(arena, seed=4)
    loaded = file.load(places, range(BLOCKS))
    drive(file)
    assert [(transfer.op, transfer.state, transfer.settled) for transfer in (stored, loaded)] == [
        ("store", "done", True),
        ("load", "done", True),
    ]
    assert sums(arena) == before
    assert file.path.read_bytes()[places[5] * BLOCK_BYTES : (places[5] + 1) * BLOCK_BYTES] == arena.view(5).tobytes()


def test_many_at_once_do_not_mix(file: BlockFile, arena: Arena) -> None:
    before = sums(arena)
    stores = [file.store([block], [PLACES - 1 - block]) for block in range(BLOCKS)]
    drive(file)
    loads = [file.load([PLACES - 1 - block], [BLOCKS - 1 - block]) for block in range(BLOCKS)]
    drive(file)
    assert {transfer.state for transfer in stores + loads} == {"done"}
    assert sums(arena) == before[::-1]


def test_places_outside_the_file_cannot_be_named(file: BlockFile) -> None:
    for local, places in (([0], [PLACES]), ([BLOCKS], [0]), ([0], [-1]), ([0, 1], [2, 2])):
        with pytest.raises(BadBlocks):
            file.store(local, places)
    with pytest.raises(BadBlocks):
        file.load([0, 1], [2, 2])


def test_a_transfer_past_its_deadline_fails_and_settles(file: BlockFile) -> None:
    transfer = file.store(range(BLOCKS), range(BLOCKS), timeout_s=0.0)
    assert drive(file) == [transfer]
    assert (transfer.state, transfer.reason) == ("failed", "deadline")
    until_s = time.monotonic() + 60
    while not transfer.settled:
        assert time.monotonic() < until_s
        file.poll()


def test_a_file_that_cannot_be_made_is_a_failed_start(tmp_path: Path, arena: Arena) -> None:
    with pytest.raises(EngineStartFailed, match="no_such"):
        BlockFile(tmp_path / "no_such" / "blocks", arena, blocks=PLACES)
    with pytest.raises(EngineStartFailed, match="bytes"):
        BlockFile(tmp_path / "blocks", arena, blocks=1 << 40)


def test_a_closed_file_says_so(tmp_path: Path, arena: Arena) -> None:
    file = BlockFile(tmp_path / "blocks", arena, blocks=PLACES)
    file.close()
    file.close()
    with pytest.raises(Closed):
        file.poll()
    with pytest.raises(Closed):
        file.store([0], [0])
