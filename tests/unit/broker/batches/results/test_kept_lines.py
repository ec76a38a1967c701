"""Lines of results that were seen are kept as they would be made again, and a disk that fails costs only the second read."""

from __future__ import annotations

import errno
import json
import tempfile

import msgspec
import pytest

from headrace.broker.batches.lines import output_line
from headrace.broker.batches.record import line_name
from headrace.broker.batches.results import kept_lines
from headrace.broker.batches.results.kept_lines import KeptLines
from headrace.broker.batches.scratch_space import ScratchSpace
from headrace.broker.messages import JobResult, ResultObject, ResultResponse
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
    before = kept_lines.metrics.NOT_KEPT._value.get()
    scratch = ScratchSpace(space)
    kept = KeptLines(scratch, BATCH, 2)
    await kept.keep({1: result(1)})
    await kept.keep({2: result(2)})
    assert await kept.read([1, 2]) == {}
    assert kept_lines.metrics.NOT_KEPT._value.get() == before + 1
    assert scratch.left == space
