"""Lines are published as jobs whose ids do not change."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.broker.batches import fan_out as input_copies
from headrace.broker.batches.batch_run import BatchRun
from headrace.broker.batches.fan_out import FanOut, InputCopy, ScratchFile, ScratchSpace
from headrace.broker.batches.record import InputGone
from headrace.broker.batches.validation import LinePlan
from headrace.broker.durable.stored_job import parse_job
from headrace.jetstream.errors import NotConnected, PayloadTooLarge, PublishUnknown, QueueFull
from tests.support.batch_fakes import SUBJECTS, Scene
from tests.unit.broker.batches.test_batches_batch_run import Play, soon
from tests.unit.broker.batches.test_batches_validation import checked, line
from tests.unit.broker.batches.test_states import record

DATA = b"".join(line(number) for number in range(1, 6))


def scene_of(data: bytes = DATA) -> tuple[Scene, FanOut, LinePlan]:
    scene = Scene()
    scene.files.stored["_", "file-1"] = data
    return scene, FanOut(scene.messaging, SUBJECTS, scene.files), checked(data)  # type: ignore[arg-type]


async def test_a_published_line_is_read_as_a_job_of_the_batch() -> None:
    scene, fan_out, plan = scene_of()
    batch = record("in_progress", endpoint="/v1/chat/completions", model="Org/M", expires_at=5000)
    assert not (await fan_out.publish(batch, await fan_out.lines(batch, plan, [3]))).full
    [(subject, data, headers, msg_id)] = scene.messaging.published
    assert subject == "hr.job.org-m._"
    job = parse_job(data, headers, tenant="_", seq=1, stored=100.0)
    assert (job.name, job.batch, job.custom_id, job.deadline) == (f"{batch.id}-3", batch.id, "c3", 5000.0)
    assert (job.endpoint, job.request_class, msg_id) == (batch.endpoint, "batch", job.name)
    assert b"say 3" in job.body


async def test_a_custom_id_cannot_add_headers() -> None:
    data = line(1, custom_id="a\r\nHr-Class: hi")
    scene, fan_out, plan = scene_of(data)
    batch = record("in_progress", model="m")
    await fan_out.publish(batch, await fan_out.lines(batch, plan, [1]))
    [(_, stored, headers, _)] = scene.messaging.published
    assert "\n" not in "".join(headers.values())
    assert parse_job(stored, headers, tenant="_", seq=1, stored=0.0).custom_id == "a\r\nHr-Class: hi"


async def test_a_full_queue_is_reported_and_the_rest_is_not_tried() -> None:
    scene, fan_out, plan = scene_of(b"".join(line(n) for n in range(1, 500)))
    batch = record("in_progress", model="m")
    tries = 0

    def refuse() -> None:
        nonlocal tries
        tries += 1
        raise QueueFull("full")

    scene.messaging.refuse = refuse
    assert (await fan_out.publish(batch, await fan_out.lines(batch, plan, range(1, 500)))).full
    assert tries < 100


async def test_an_unknown_outcome_is_repeated_and_then_left_to_the_caller() -> None:
    scene, fan_out, plan = scene_of()
    batch = record("in_progress", model="m")
    outcomes: list[Exception | None] = [PublishUnknown("?"), None]

    def refuse() -> None:
        if outcomes and (error := outcomes.pop(0)) is not None:
            raise error

    scene.messaging.refuse = refuse
    lines = await fan_out.lines(batch, plan, [1])
    assert not (await fan_out.publish(batch, lines)).full
    outcomes[:] = [PublishUnknown("?")] * 3
    with pytest.raises(PublishUnknown):
        await fan_out.publish(batch, lines)
    outcomes[:] = [NotConnected("down")]
    with pytest.raises(NotConnected):
        await fan_out.publish(batch, lines)


async def test_lines_that_no_message_can_carry_are_named() -> None:
    scene, fan_out, plan = scene_of()
    batch = record("in_progress", model="m")

    def refuse() -> None:
        raise PayloadTooLarge("large")

    scene.messaging.refuse = refuse
    assert (await fan_out.publish(batch, await fan_out.lines(batch, plan, [1, 2]))).too_large == (1, 2)


async def test_a_file_that_has_become_shorter_is_gone() -> None:
    scene, fan_out, plan = scene_of()
    scene.files.stored["_", "file-1"] = DATA[:-5]
    with pytest.raises(InputGone, match="has lost bytes"):
        await fan_out.lines(record(), plan, [5])


async def test_what_was_appended_is_read_by_its_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = ScratchFile(ScratchSpace(100))
    await file.append([b"one", b"two"])
    await file.append([b"three"])
    assert file.size == 11
    assert await file.read({7: (3, 3), 8: (6, 5)}) == {7: b"two", 8: b"three"}
    assert not list(tmp_path.iterdir())
    file.close()


async def test_all_files_share_one_space_and_give_it_back() -> None:
    space = ScratchSpace(10)
    one, two = ScratchFile(space), ScratchFile(space)
    await one.append([b"123456"])
    with pytest.raises(OSError, match="as many bytes as they may"):
        await two.append([b"12345"])
    assert space.left == 4
    one.close()
    one.close()
    assert space.left == 10
    two.close()


async def test_a_closed_file_has_nothing_and_takes_nothing() -> None:
    file = ScratchFile(ScratchSpace(100))
    await file.append([b"one"])
    file.close()
    with pytest.raises(OSError, match="removed"):
        await file.read({1: (0, 3)})


async def test_bytes_that_are_gone_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ScratchFile(ScratchSpace(100))
    await file.append([b"one"])
    monkeypatch.setattr(os, "pread", lambda *_: b"o")
    with pytest.raises(OSError, match="not there as a whole"):
        await file.read({1: (0, 3)})
    file.close()


__all__ = ["soon"]


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
