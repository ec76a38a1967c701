"""Splits the request ids of stored jobs: a job's id, a mark, and the name of one delivery of the job."""

from __future__ import annotations

RUN_MARK = "~"  # between a job's id and the nonce of a delivery; allowed nowhere else


def job_of_run(request_id: str) -> str:
    """Return the id of the job that a request belongs to; of one that belongs to none its own id."""
    return request_id.partition(RUN_MARK)[0]
