"""Lines of results that were seen are kept as they would be made again, and a disk that fails costs only the second read."""

from __future__ import annotations

import asyncio
import errno
import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import count

import msgspec
import pytest

from headrace.broker.batches import results
from headrace.broker.batches.batch_run import BatchRun
from headrace.broker.batches.fan_out import ScratchSpace
from headrace.broker.batches.record import LineProgress, line_name, output_line
from headrace.broker.batches.results import KeptLines, ResultFiles, SeenResults, new_try, pages, result_file_id
from headrace.broker.durable.names import JobRef
from headrace.broker.messages.durable import JobResult, ResultObject, ResultResponse
from headrace.jetstream.errors import NotConnected, ObjectNotFound, RequestTimeout
from tests.support.batch_fakes import Scene
from tests.unit.broker.batches.test_batches_batch_run import Play, soon
from tests.unit.broker.batches.test_states import record

BATCH = record().id


def result(number: int, **changes: object) -> JobResult:
    answer = ResultResponse(status_code=200, request_id="r", body=msgspec.Raw(b'{"n":%d}' % number))
    made = JobResult(id=line_name(BATCH, number), status="done", custom_id=f"c{number}", response=answer)
    return msgspec.structs.replace(made, **changes)


async def test_a_kept_line_is_the_one_that_its_result_makes() -> None:
    kept = KeptLines(ScratchSpace(10_000), BATCH, 5)
    await kept.keep({4: result(4), 2: result(2)})
    await kept.keep({5: result(5), 2: result(99)})  # a result never changes: the first one stands
    expected = {n: output_line(line_name(BATCH, n), result(n), result(n).response) for n in (2, 4, 5)}
    assert await kept.read([1, 2, 3, 4, 5]) == expected
    assert json.loads(expected[4])["response"]["body"] == {"n": 4}
    kept.close()
    assert await kept.read([2]) == {}


async def test_a_large_result_is_left_to_be_read_from_its_object() -> None:
    kept = KeptLines(ScratchSpace(10_000), BATCH, 1)
    await kept.keep({1: result(1, response=None, object=ResultObject(name="o", size=1, digest="d"))})
    assert await kept.read([1]) == {}
    kept.close()


@pytest.mark.parametrize("space", [0, 10_000])
async def test_a_disk_that_takes_no_more_ends_the_keeping_with_a_metric(space: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if space:
        monkeypatch.setattr(tempfile, "TemporaryFile", full)
    before = results.metrics.NOT_KEPT._value.get()
    scratch = ScratchSpace(space)
    kept = KeptLines(scratch, BATCH, 2)
    await kept.keep({1: result(1)})
    await kept.keep({2: result(2)})
    assert await kept.read([1, 2]) == {}
    assert results.metrics.NOT_KEPT._value.get() == before + 1
    assert scratch.left == space


SEEN_RESULTS_BATCH = "batch_" + "a" * 32


def ref(number: int | str, *, tenant: str = "t", batch: str = SEEN_RESULTS_BATCH, name: str = "") -> JobRef:
    return JobRef(tenant=tenant, name=name or f"{SEEN_RESULTS_BATCH}-{number}", batch=batch)


def seen_results_result(size: int = 2) -> JobResult:
    response = ResultResponse(status_code=200, request_id="r", body=msgspec.Raw(b"x" * size))
    return JobResult(id="x", status="done", response=response)


def expecting(most_bytes: int = 1000) -> SeenResults:
    seen = SeenResults(most_bytes)
    seen.expect("t", SEEN_RESULTS_BATCH)
    return seen


def test_a_result_is_handed_over_once() -> None:
    seen, told = expecting(), seen_results_result()
    seen.see(ref(7), told)
    assert seen.take("t", SEEN_RESULTS_BATCH) == {7: told}
    assert seen.take("t", SEEN_RESULTS_BATCH) == {}


@pytest.mark.parametrize(
    "job",
    [
        ref(1, tenant="other"),  # the subject of its result is another one
        ref(1, batch="batch_" + "b" * 32),
        ref(1, batch=""),
        ref("01"),
        ref("0"),
        ref("-1"),
        ref("²"),  # a digit, and no number
        ref("1" * 5000),  # more digits than Python makes a number of
        ref(1, name="batch_" + "b" * 32 + "-1"),
        ref(1, name="1"),
    ],
    ids=["tenant", "batch", "none", "zeros", "zero", "negative", "power", "long", "name", "bare"],
)
def test_a_job_that_is_no_line_of_the_batch_does_not_count(job: JobRef) -> None:
    seen = expecting()
    seen.see(job, seen_results_result())
    assert seen.take("t", SEEN_RESULTS_BATCH) == {}


def test_what_finds_no_room_is_left_out_until_what_waits_is_taken() -> None:
    seen = expecting(most_bytes=100)
    for number in (1, 2, 3):
        seen.see(ref(number), seen_results_result(size=40))
    assert list(seen.take("t", SEEN_RESULTS_BATCH)) == [1, 2]
    seen.see(ref(3), seen_results_result(size=100))
    assert list(seen.take("t", SEEN_RESULTS_BATCH)) == [3]


def test_a_batch_that_has_ended_here_leaves_its_room() -> None:
    seen = expecting(most_bytes=100)
    seen.see(ref(1), seen_results_result(size=100))
    seen.forget("t", SEEN_RESULTS_BATCH)
    seen.see(ref(2), seen_results_result(size=1))
    assert seen.take("t", SEEN_RESULTS_BATCH) == {}
    seen.expect("t", SEEN_RESULTS_BATCH)
    seen.see(ref(3), seen_results_result(size=100))
    assert list(seen.take("t", SEEN_RESULTS_BATCH)) == [3]
    seen.forget("t", "batch_that_was_never_here")


def finished(scene: Scene, statuses: list[str]) -> tuple[ResultFiles, LineProgress, str]:
    progress, batch_id = LineProgress(len(statuses)), record().id
    for number, status in enumerate(statuses, 1):
        name = line_name(batch_id, number)
        answer = ResultResponse(status_code=200 if status == "done" else 500, request_id="r", body=msgspec.Raw(b"{}"))
        result = JobResult(id=name, status=status, custom_id=f"c{number}", response=answer)  # type: ignore[arg-type]
        scene.results.stored[name] = result
        progress.see(number, result)
    return ResultFiles(scene.files, scene.results), progress, batch_id


def ids(scene: Scene, file_id: str | None) -> list[str]:
    assert file_id is not None
    return [json.loads(line)["custom_id"] for line in scene.files.stored["_", file_id].splitlines()]


async def test_each_line_is_in_one_file() -> None:
    scene = Scene()
    files, progress, batch_id = finished(scene, ["done", "failed", "done"] * 100)
    written = await files.write(record(id=batch_id), "n", progress)
    assert ids(scene, written.output) == [f"c{n}" for n in range(1, 301) if n % 3 != 2]
    assert ids(scene, written.error) == [f"c{n}" for n in range(2, 301, 3)]


@pytest.mark.parametrize("status", ["done", "failed"])
async def test_a_file_that_would_be_empty_is_not_written(status: str) -> None:
    scene = Scene()
    files, progress, batch_id = finished(scene, [status])
    written = await files.write(record(id=batch_id), "n", progress)
    assert (written.output is None, written.error is None) == (status != "done", status == "done")
    assert len(scene.files.stored) == 1


async def test_a_result_that_an_old_read_does_not_show_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "LOOK_AGAIN_S", 0.0)
    scene = Scene()
    files, progress, batch_id = finished(scene, ["done", "done"])
    scene.results.lag = {line_name(batch_id, 2)}
    assert ids(scene, (await files.write(record(id=batch_id), "n", progress)).output) == ["c1", "c2"]
    scene.results.stored.clear()
    with pytest.raises(RequestTimeout, match="2 results that were seen cannot be read"):
        await files.write(record(id=batch_id), "n", progress)


async def test_an_answer_whose_object_is_lost_is_an_error_on_its_line() -> None:
    scene = Scene()
    files, progress, batch_id = finished(scene, ["done"])
    scene.results.lost = ObjectNotFound("gone")
    written = await files.write(record(id=batch_id), "n", progress)
    assert written.output is not None
    assert json.loads(scene.files.stored["_", written.output])["error"]["code"] == "result_lost"


async def test_files_of_other_tries_are_swept_and_those_that_are_named_are_kept() -> None:
    scene = Scene()
    files, progress, batch_id = finished(scene, ["done", "failed"])
    lost = await files.write(record(id=batch_id), "lost", progress)
    won = await files.write(record(id=batch_id), "won", progress)
    named = record("completed", id=batch_id, output_file_id=won.output, error_file_id=won.error)
    await files.sweep(named, ["lost", "won"])
    assert {file_id for _, file_id in scene.files.stored} == set(won)
    assert set(lost) & set(won) == set()


def test_no_two_tries_share_a_file() -> None:
    names = {result_file_id("b", new_try(), kind) for _ in range(50) for kind in results.KINDS}
    assert len(names) == 100


def test_pages_are_whole_but_for_the_last_one() -> None:
    assert list(pages(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(pages([], 2)) == []


__all__ = ["soon"]


class Reads:
    """Counts the results that reads have shown."""

    def __init__(self, play: Play, monkeypatch: pytest.MonkeyPatch, *, fails: int = 0) -> None:
        """`fails`: the number of the read that fails, 0 = none."""
        self.shown = 0
        get_many = play.scene.results.get_many
        numbers = count(1)

        async def counted(tenant: str, tokens: Sequence[str]) -> Mapping[str, JobResult]:
            if next(numbers) == fails:
                raise NotConnected("the server is away")
            found = await get_many(tenant, tokens)
            self.shown += len(found)
            return found

        monkeypatch.setattr(play.scene.results, "get_many", counted)


async def ended(play: Play, *, answers: bool = True) -> list[str]:
    task = asyncio.create_task(BatchRun(play.scene.parts(), "_", play.batch.id, "me").run())
    async with asyncio.timeout(60):
        while not task.done():  # with a thread in between, turns of the loop do not count
            if answers:
                play.answer()
            await asyncio.sleep(0.001)
    record = await play.record()
    files = [file for file in (record.output_file_id, record.error_file_id) if file]
    return [custom_id for file in files for custom_id in play.custom_ids(file)]


@pytest.mark.parametrize(("space", "reads"), [(100_000, 1), (0, 2)])
async def test_a_result_is_read_once_where_its_line_can_be_kept(
    space: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play(lines=12, window_lines=6)
    play.scene.scratch = ScratchSpace(space)
    shown = Reads(play, monkeypatch)
    await play.start()
    assert await ended(play) == [f"c{n}" for n in range(1, 13)]
    assert shown.shown == 12 * reads
    assert play.scene.scratch.left == space


async def test_results_that_the_carrier_here_has_seen_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(lines=12, window_lines=6)
    play.scene.scratch = ScratchSpace(100_000)
    play.scene.seen = seen = SeenResults()
    shown, stored, answer = Reads(play, monkeypatch), play.scene.results.stored, play.answer

    def carry() -> None:
        """Answer as a carrier here does, which tells of three in four lines, and of one that the batch does not have."""
        before = set(stored)
        answer()
        for name in stored.keys() - before:
            if not name.endswith(("-4", "-8", "-12")):
                seen.see(JobRef(tenant="_", name=name, batch=play.batch.id), stored[name])
                seen.see(JobRef(tenant="_", name=line_name(play.batch.id, 1000), batch=play.batch.id), stored[name])

    monkeypatch.setattr(play, "answer", carry)
    await play.start()
    assert await ended(play) == [f"c{n}" for n in range(1, 13)]
    record = await play.record()
    assert (record.counts.completed, record.tokens.prompt) == (12, 36)
    assert shown.shown == 3
    name = line_name(play.batch.id, 1)
    seen.see(JobRef(tenant="_", name=name, batch=play.batch.id), stored[name])
    assert seen.take("_", play.batch.id) == {}, "the batch is over, and its results are still kept"


async def test_a_new_owner_reads_on_where_its_first_look_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "PAGE", 4)
    play = Play(lines=12)
    play.scene.scratch = ScratchSpace(100_000)
    await play.start()
    first = asyncio.create_task(BatchRun(play.scene.parts(), "_", play.batch.id, "me").run())
    async with asyncio.timeout(60):
        while len(play.scene.messaging.published) < 12 or (await play.record()).cursor < 12:
            await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.wait([first])
    play.answer()
    reads = Reads(play, monkeypatch, fails=3)
    assert len(await ended(play)) == 12
    assert reads.shown == 12
    assert play.scene.scratch.left == 100_000


async def test_ends_of_closed_lines_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(lines=9, window_lines=3)
    await play.start()
    await play.run("in_progress", answers=False)
    play.scene.scratch = ScratchSpace(100_000)
    shown = Reads(play, monkeypatch)
    stored = await play.scene.store.read("_", play.batch.id)
    await play.scene.store.replace(stored, msgspec.structs.replace(stored.record, status="cancelling"))
    assert await ended(play, answers=False) == [f"c{n}" for n in range(1, 10)]
    assert shown.shown == 0
