"""Copies of input files have the same lines as the files, within their space, and leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.broker.batches import input_copies
from headrace.broker.batches.batch_run import BatchRun
from headrace.broker.batches.fan_out import FanOut
from headrace.broker.batches.input_copies import InputCopy
from headrace.broker.batches.scratch_space import ScratchSpace
from tests.support.batch_fakes import SUBJECTS, Scene
from tests.unit.broker.batches.test_batch_run import Play, soon
from tests.unit.broker.batches.test_states import record
from tests.unit.broker.batches.test_validation import checked, line

__all__ = ["soon"]

DATA = b"".join(line(number) for number in range(1, 6))


async def chunks_of(data: bytes, size: int = 7) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def copied(space: ScratchSpace, data: bytes = DATA) -> InputCopy:
    copy = InputCopy(space, "batch_1")
    assert b"".join([chunk async for chunk in copy.copied(chunks_of(data))]) == data
    return copy


@pytest.mark.parametrize("at_once", [1, 50, 10_000])
async def test_a_copy_has_the_lines_of_its_file(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_copies, "WRITE_BYTES", at_once)
    plan = checked(DATA)
    copy = await copied(ScratchSpace(len(DATA)))
    found = await copy.lines({number: plan.place(number) for number in (4, 2)})
    assert found == {number: DATA[plan.place(number)[0] :][: plan.place(number)[1]] for number in (4, 2)}
    copy.close()


async def test_lines_of_a_copied_file_are_not_read_from_the_store() -> None:
    scene, plan = Scene(), checked(DATA)
    fan_out = FanOut(scene.messaging, SUBJECTS, scene.files)  # type: ignore[arg-type]
    copy = await copied(ScratchSpace(10_000))
    assert b"say 3" in (await fan_out.lines(record(), plan, [3], copy))[3]  # the store has no such file
    copy.close()
    scene.files.stored["_", "file-1"] = DATA
    assert b"say 3" in (await fan_out.lines(record(), plan, [3], copy))[3]


async def test_a_file_that_was_not_read_to_its_end_has_no_copy() -> None:
    copy = InputCopy(ScratchSpace(10_000), "batch_1")
    chunks = copy.copied(chunks_of(DATA))
    await anext(chunks)
    assert await copy.lines({1: (0, 5)}) is None
    copy.close()


async def test_copies_stay_within_their_space_and_give_it_back() -> None:
    space = ScratchSpace(len(DATA) + 10)
    first = await copied(space)
    second = await copied(space)
    assert await second.lines({1: (0, 5)}) is None
    assert await first.lines({1: (0, 5)}) == {1: DATA[:5]}
    assert space.left == 10
    first.close()
    first.close()
    second.close()
    assert space.left == len(DATA) + 10


async def test_a_folder_that_cannot_be_written_ends_only_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = input_copies.metrics.NOT_COPIED._value.get()
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    space = ScratchSpace(10_000)
    copy = await copied(space)
    assert await copy.lines({1: (0, 5)}) is None
    assert space.left == 10_000
    assert input_copies.metrics.NOT_COPIED._value.get() == before + 1


async def test_a_copy_that_has_become_shorter_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    space = ScratchSpace(10_000)
    copy = await copied(space)
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    assert await copy.lines({1: (0, 5)}) is None
    assert space.left == 10_000


async def test_a_batch_reads_its_file_once_and_leaves_no_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    play = Play(lines=12, window_lines=6)
    play.scene.scratch = ScratchSpace(100_000)
    reads: list[int | None] = []
    read = play.scene.files.read

    def counted(tenant: str, file_id: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        reads.append(length)
        return read(tenant, file_id, offset=offset, length=length)

    monkeypatch.setattr(play.scene.files, "read", counted)
    await play.start()
    task = asyncio.create_task(BatchRun(play.scene.parts(), "_", play.batch.id, "me").run())
    while not task.done():  # with a thread in between, turns of the loop do not count
        play.answer()
        await asyncio.sleep(0.001)
    assert (await play.record()).status == "completed"
    assert reads == [None]
    assert play.scene.scratch.left == 100_000
    assert not list(tmp_path.iterdir())
