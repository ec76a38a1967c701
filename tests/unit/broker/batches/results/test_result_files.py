"""Result files hold each line once, in the order of the input, under ids that no other try has."""

from __future__ import annotations

import json

import msgspec
import pytest

from headrace.broker.batches.progress import LineProgress
from headrace.broker.batches.record import line_name
from headrace.broker.batches.results import result_files
from headrace.broker.batches.results.result_files import ResultFiles, new_try, pages, result_file_id
from headrace.broker.messages import JobResult, ResultResponse
from headrace.jetstream.errors import ObjectNotFound, RequestTimeout
from tests.support.batch_fakes import Scene
from tests.unit.broker.batches.test_states import record


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
    monkeypatch.setattr(result_files, "LOOK_AGAIN_S", 0.0)
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
    names = {result_file_id("b", new_try(), kind) for _ in range(50) for kind in result_files.KINDS}
    assert len(names) == 100


def test_pages_are_whole_but_for_the_last_one() -> None:
    assert list(pages(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(pages([], 2)) == []
