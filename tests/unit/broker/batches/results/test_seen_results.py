"""An owner gets what the carrier beside it has seen, of the lines of its batch alone, and no more than there is room for."""

from __future__ import annotations

import msgspec
import pytest

from headrace.broker.batches.results.seen_results import SeenResults
from headrace.broker.durable.names import JobRef
from headrace.broker.messages import JobResult, ResultResponse

BATCH = "batch_" + "a" * 32


def ref(number: int | str, *, tenant: str = "t", batch: str = BATCH, name: str = "") -> JobRef:
    return JobRef(tenant=tenant, name=name or f"{BATCH}-{number}", batch=batch)


def result(size: int = 2) -> JobResult:
    response = ResultResponse(status_code=200, request_id="r", body=msgspec.Raw(b"x" * size))
    return JobResult(id="x", status="done", response=response)


def expecting(most_bytes: int = 1000) -> SeenResults:
    seen = SeenResults(most_bytes)
    seen.expect("t", BATCH)
    return seen


def test_a_result_is_handed_over_once() -> None:
    seen, told = expecting(), result()
    seen.see(ref(7), told)
    assert seen.take("t", BATCH) == {7: told}
    assert seen.take("t", BATCH) == {}


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
    seen.see(job, result())
    assert seen.take("t", BATCH) == {}


def test_what_finds_no_room_is_left_out_until_what_waits_is_taken() -> None:
    seen = expecting(most_bytes=100)
    for number in (1, 2, 3):
        seen.see(ref(number), result(size=40))
    assert list(seen.take("t", BATCH)) == [1, 2]
    seen.see(ref(3), result(size=100))
    assert list(seen.take("t", BATCH)) == [3]


def test_a_batch_that_has_ended_here_leaves_its_room() -> None:
    seen = expecting(most_bytes=100)
    seen.see(ref(1), result(size=100))
    seen.forget("t", BATCH)
    seen.see(ref(2), result(size=1))
    assert seen.take("t", BATCH) == {}
    seen.expect("t", BATCH)
    seen.see(ref(3), result(size=100))
    assert list(seen.take("t", BATCH)) == [3]
    seen.forget("t", "batch_that_was_never_here")
