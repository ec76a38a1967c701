"""Lines of result files have OpenAI's shape."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.batches.record import (
    LineCounts,
    LineProgress,
    closed_line,
    custom_id_of,
    file_kind,
    large_line,
    lost_line,
    output_line,
)
from headrace.broker.messages.durable import JobResult, JobStatus, ResultError, ResultResponse, ResultTokens


def response(status: int = 200) -> ResultResponse:
    return ResultResponse(status_code=status, request_id="req-1", body=msgspec.Raw(b'{"a": "\xc3\xa9"}'))


def test_an_answer_is_a_line_of_the_output_file() -> None:
    result = JobResult(id="batch_1-7", status="done", custom_id="c7", response=response())
    shown = json.loads(output_line("batch_1-7", result, result.response))
    assert shown.pop("id").startswith("batch_req_")
    answer = {"status_code": 200, "request_id": "req-1", "body": {"a": "é"}}
    assert shown == {"custom_id": "c7", "response": answer, "error": None}
    assert file_kind(result) == "output"


def test_an_http_error_is_a_line_of_the_error_file_with_its_response_and_no_error() -> None:
    result = JobResult(id="b-1", status="failed", response=response(400), error=ResultError(code="x", message="y"))
    shown = json.loads(output_line("b-1", result, result.response))
    assert (shown["response"]["status_code"], shown["error"]) == (400, None)
    assert file_kind(result) == "error"


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("expired", "batch_expired", "This request could not be executed before the completion window expired."),
        ("cancelled", "batch_cancelled", "This request was not executed because the batch was cancelled."),
    ],
)
def test_a_line_that_did_not_run_has_an_error_and_no_response(end: str, code: str, message: str) -> None:
    result = closed_line("batch_1", 3, "c3", end, 5.0)  # type: ignore[arg-type]
    shown = json.loads(output_line(result.id, result, None))
    assert (shown["custom_id"], shown["response"], shown["error"]) == ("c3", None, {"code": code, "message": message})
    assert (result.id, result.status) == ("batch_1-3", end)


def test_a_result_without_an_answer_and_without_a_reason_says_its_status() -> None:
    assert json.loads(output_line("b-1", JobResult(id="b-1", status="poison"), None))["error"]["code"] == "poison"


def test_a_line_has_one_id_for_ever_and_another_one_than_its_neighbour() -> None:
    result = JobResult(id="", status="done")
    ids = [json.loads(output_line(name, result, None))["id"] for name in ("b-1", "b-1", "b-2")]
    assert ids[0] == ids[1] != ids[2]


def test_a_line_is_one_line_whatever_its_answer_has() -> None:
    result = JobResult(id="b", status="done", custom_id="a\nb\u2028", response=response())
    assert output_line("b", result, result.response).count(b"\n") == 1


def test_lines_that_cannot_be_run_or_read_say_so() -> None:
    assert json.loads(lost_line("b-1", JobResult(id="b-1", status="done")))["error"]["code"] == "result_lost"
    assert large_line("b", 1, "c", 0.0).status == "failed"


def test_the_custom_id_is_read_from_the_line() -> None:
    assert custom_id_of(b'{"custom_id": "c1", "body": {}}') == "c1"
    assert custom_id_of(b"") == custom_id_of(b'{"custom_id": 7}') == ""


STATUSES: list[JobStatus] = ["done", "failed", "cancelled", "expired", "poison", "malformed"]


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(STATUSES)), max_size=40))
def test_each_line_counts_once_by_its_first_result(looks: list[tuple[int, JobStatus]]) -> None:
    progress = LineProgress(9)
    progress.publish(range(1, 10))
    first: dict[int, JobStatus] = {}
    for number, status in looks:
        first.setdefault(number, status)
        progress.see(number, JobResult(id="x", status=status, tokens=ResultTokens(prompt=2, completion=1)))
    done = sorted(n for n, status in first.items() if status == "done")
    failed = sorted(n for n, status in first.items() if status != "done")
    assert progress.counts == LineCounts(total=9, completed=len(done), failed=len(failed))
    assert list(progress.of_kind("output")) == done
    assert list(progress.of_kind("error")) == failed
    assert sorted(progress.out) == progress.open(range(1, 10))
    assert progress.waiting == len(progress.out)
    assert progress.complete == (len(first) == 9)
    assert progress.tokens == ResultTokens(prompt=2 * len(first), completion=len(first))


def test_a_line_whose_result_was_seen_is_not_waited_for_again() -> None:
    progress = LineProgress(2)
    progress.see(1, JobResult(id="x", status="done"))
    progress.publish([1, 2])
    assert progress.out == [2]


def test_a_batch_without_lines_is_complete() -> None:
    assert LineProgress(0).complete
