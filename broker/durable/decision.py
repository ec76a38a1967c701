"""Decides what to do with a stored job: before it is submitted, and when its run has ended. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from headrace.broker.durable.fold import JobState
from headrace.broker.durable.stored_job import StoredJob
from headrace.broker.errors import (
    DeadlineExceeded,
    JobCancelled,
    JobError,
    JobRefused,
    JobWithdrawn,
    PoisonJob,
    ResumeImpossible,
    SlowClient,
)
from headrace.broker.messages import JobFault, JobStatus

POISON_CARRIERS = 3  # carriers that died between their take and the submission of a job
LEAST_WINDOW = 8
JOBS_PER_SLOT = 2

Ended = JobStatus | Literal["retry"]


def has_entries(job: StoredJob, num_delivered: int) -> bool:
    """Return whether this delivery of a job writes entries: a plain job does so from its second delivery on."""
    return job.durable or num_delivered > 1


def asks_carriers(num_delivered: int, state: JobState) -> bool:
    """Return whether another carrier may have the job, so that all have to be asked."""
    return num_delivered > 1 or bool(state.takes)


def is_left_to(taker: bool | None, others: Collection[bool | None], *, taker_gone: bool) -> bool:
    """Decide whether a job is left to its carrier. Answers to `carrying?`: None = there was none.

    `taker`: that of the carrier that took the job last, False if there is no other one. `taker_gone`: a fresh read of its lease
    shows that it is gone. A carrier that took nothing and does not answer is not waited for: nothing says that it has the job.
    """
    return taker is True or any(answer is True for answer in others) or (taker is None and not taker_gone)


def is_carrier_poison(state: JobState, dead: Collection[str]) -> bool:
    """Decide whether a job ends its carriers. `dead`: carriers whose lease is gone and that announced no drain."""
    return len({take.carrier for take in state.unbegun() if take.carrier in dead}) >= POISON_CARRIERS


def window(slots: int, carriers: int, most: int) -> int:
    """Return the number of jobs of a model that one of these carriers may hold: what the pool's slots can use soon."""
    if slots <= 0:
        return 0
    return min(most, max(LEAST_WINDOW, JOBS_PER_SLOT * slots // max(1, carriers)))


def end_of(error: JobError, *, emitted: bool) -> Ended:
    """Return the status with which a job ends whose run ended in this error, or `retry`. `emitted`: clients have tokens.

    What the pool refuses for the moment is tried again: the job has until its deadline.
    """
    if isinstance(error, JobRefused | SlowClient | JobCancelled):
        return "retry"
    if isinstance(error, ResumeImpossible) and not emitted:
        return "retry"
    if isinstance(error, DeadlineExceeded):
        return "expired"
    if isinstance(error, JobWithdrawn):
        return "cancelled"
    return "poison" if isinstance(error, PoisonJob) else "failed"


def fault_of(error: JobError) -> JobFault:
    """Return the fault that an error stands for."""
    code = error.reason if isinstance(error, JobRefused) else error.code
    param: str | None = getattr(error, "param", None)
    return JobFault(code, str(error), retriable=error.retriable, param=param)
