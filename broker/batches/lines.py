"""Writes results of lines as the lines of OpenAI's output and error files."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from headrace.broker.batches.record import line_name
from headrace.broker.batches.states import Closing
from headrace.broker.codec import NOT_DECODED
from headrace.broker.messages import JobResult, ResultError, ResultResponse

FileKind = Literal["output", "error"]

_ENDS = {
    "expired": ResultError(
        code="batch_expired", message="This request could not be executed before the completion window expired."
    ),
    "cancelled": ResultError(code="batch_cancelled", message="This request was not executed because the batch was cancelled."),
}


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output or error file."""

    id: str
    custom_id: str
    response: ResultResponse | None
    error: ResultError | None


def file_kind(result: JobResult) -> FileKind:
    """Return the file that a line belongs to: the output file has the answers of status 2xx, which jobs report as `done`."""
    return "output" if result.status == "done" else "error"


def output_line(name: str, result: JobResult, response: ResultResponse | None) -> bytes:
    """Return the result of the job `name` as a line of its file, its end of line included."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    error = None if response is not None else result.error
    if response is None and error is None:
        error = ResultError(code=result.status, message=f"The request ended as {result.status}.")
    line = OutputLine(id=f"batch_req_{digest}", custom_id=result.custom_id, response=response, error=error)
    return msgspec.json.encode(line) + b"\n"


def closed_line(batch_id: str, number: int, custom_id: str, end: Closing, now: float) -> JobResult:
    """Return the result of a line that has none when its batch is closed."""
    return JobResult(id=line_name(batch_id, number), status=end, custom_id=custom_id, error=_ENDS[end], finished=now)


def large_line(batch_id: str, number: int, custom_id: str, now: float) -> JobResult:
    """Return the result of a line that no message of this server can carry."""
    error = ResultError(code="line_too_long", message="The line is longer than a message of this server can carry.")
    return JobResult(id=line_name(batch_id, number), status="failed", custom_id=custom_id, error=error, finished=now)


def lost_line(name: str, result: JobResult) -> bytes:
    """Return the line of a result whose response was kept as an object and cannot be read any more."""
    error = ResultError(code="result_lost", message="The response was stored, and cannot be read any more.")
    return output_line(name, msgspec.structs.replace(result, error=error), None)


def custom_id_of(line: bytes) -> str:
    """Return the client's id of an input line that was validated; empty if the line is not the one that was."""
    try:
        return _custom.decode(line).custom_id
    except NOT_DECODED:
        return ""


class _Custom(msgspec.Struct):
    custom_id: str


_custom = msgspec.json.Decoder(_Custom)
