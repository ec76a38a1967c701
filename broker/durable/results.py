"""Builds the results of jobs: what their publishers read, for each way in which a job can end. Pure."""

from __future__ import annotations

import msgspec

from headrace.broker.durable.errors import JobRejected
from headrace.broker.durable.names import JobRef
from headrace.broker.durable.ports import RenderedJob
from headrace.broker.messages import JobFault, JobResult, JobStatus, ResultError, ResultResponse

TEXTS: dict[JobStatus, str] = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was cancelled before it was finished.",
    "poison": "This request was taken out of service because it ends the processes that run it.",
}


def error_of(job: JobRef, status: JobStatus, message: str = "") -> ResultError:
    """Return the reason why a job has no answer. Lines of batches have the codes of OpenAI's batches."""
    kind = "batch" if job.batch and status in ("expired", "cancelled") else "job"
    return ResultError(code=f"{kind}_{status}", message=message or TEXTS.get(status, f"the job is {status}"))


def without_answer(job: JobRef, status: JobStatus, now: float, message: str = "") -> JobResult:
    """Return the result of a job that was cancelled, has expired, is poison or malformed. `now` is Unix time."""
    error = error_of(job, status, message)
    return JobResult(id=job.name, custom_id=job.custom_id, status=status, error=error, finished=now)


def answered(job: JobRef, rendered: RenderedJob, now: float) -> JobResult:
    """Return the result of a job whose answer is whole."""
    return JobResult(
        id=job.name,
        custom_id=job.custom_id,
        status="done",
        response=rendered.response(),
        tokens=rendered.tokens,
        finished=now,
    )


def failed(job: JobRef, rendered: RenderedJob, now: float) -> JobResult:
    """Return the result of a job whose answer was ended with a fault: the error in the form of its API."""
    return msgspec.structs.replace(answered(job, rendered, now), status="failed")


def rejected(job: JobRef, error: JobRejected, now: float) -> JobResult:
    """Return the result of a job that cannot be run as it is."""
    response = ResultResponse(status_code=error.status, request_id=job.id, body=msgspec.Raw(error.body))
    return JobResult(id=job.name, custom_id=job.custom_id, status="failed", response=response, finished=now)


def refused(job: JobRef, *, status_code: int, code: str, message: str, now: float) -> JobResult:
    """Return the result of a job that is refused without its API: an error body as OpenAI has it."""
    body = msgspec.json.encode({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}})
    response = ResultResponse(status_code=status_code, request_id=job.id, body=msgspec.Raw(body))
    return JobResult(id=job.name, custom_id=job.custom_id, status="failed", response=response, finished=now)


def fault_result(job: JobRef, status: JobStatus, fault: JobFault | None, now: float) -> JobResult:
    """Return the result of a stream that ended in a fault, where its answer cannot be made again."""
    if status == "failed" and fault is not None:
        return refused(job, status_code=500, code=fault.code, message=fault.message, now=now)
    return without_answer(job, status, now, fault.message if fault is not None else "")
