"""Judges what a tenant may have queued as stored jobs: their number, bytes and estimated prompt tokens. Pure.

What was admitted once stays so. Of the jobs behind it each is admitted if it fits beside those that still wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from headrace.broker.durable.stored_job import StoredJob

BYTES_PER_TOKEN = 4  # for the estimate, as for lines of batches

Reason = Literal["tenant_jobs", "tenant_job_bytes", "tenant_job_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """The most that a tenant may have queued; 0 = no limit."""

    jobs: int = 0
    bytes: int = 0
    tokens: int = 0

    @property
    def reads(self) -> bool:
        """True if the jobs themselves have to be read, and not only counted."""
        return bool(self.bytes or self.tokens)


class QueueUsage(NamedTuple):
    """The jobs of a tenant, their bytes and their estimated prompt tokens."""

    jobs: int = 0
    bytes: int = 0
    tokens: int = 0

    def plus(self, other: QueueUsage) -> QueueUsage:
        """Return the sum."""
        return QueueUsage(self.jobs + other.jobs, self.bytes + other.bytes, self.tokens + other.tokens)


NOTHING = QueueUsage()


def usage_of(size: int, job: StoredJob | None = None) -> QueueUsage:
    """Return what one message of a size takes. The tokens of an Envelope are estimated in the same way as those of a text."""
    text = len(job.body) if job is not None and job.body else size
    return QueueUsage(1, size, text // BYTES_PER_TOKEN)


def over(limits: QuotaLimits, used: QueueUsage, more: QueueUsage) -> Reason | None:
    """Return the limit that `more` exceeds beside what is used, None if it fits."""
    total = used.plus(more)
    if limits.jobs and total.jobs > limits.jobs:
        return "tenant_jobs"
    if limits.bytes and total.bytes > limits.bytes:
        return "tenant_job_bytes"
    if limits.tokens and total.tokens > limits.tokens:
        return "tenant_job_tokens"
    return None


def message_of(reason: Reason, limits: QuotaLimits) -> str:
    """Return what a client or a publisher is told."""
    most, what = {
        "tenant_jobs": (limits.jobs, "jobs"),
        "tenant_job_bytes": (limits.bytes, "bytes of jobs"),
        "tenant_job_tokens": (limits.tokens, "estimated prompt tokens of jobs"),
    }[reason]
    return f"This tenant may have {most} {what} queued. Try again once some of its jobs have ended."


@dataclass(slots=True)
class TenantLedger:
    """The jobs of one tenant that were admitted up to a stored sequence."""

    seq: int = 0
    admitted: QueueUsage = NOTHING

    def settle(self, waiting: int) -> None:
        """Forget those of the admitted jobs that have ended; `waiting` is how many have not. Sizes count by their average."""
        before = self.admitted
        jobs = min(max(0, waiting), before.jobs)
        if jobs != before.jobs:
            self.admitted = QueueUsage(jobs, before.bytes * jobs // before.jobs, before.tokens * jobs // before.jobs)

    def admit_all(self, seq: int, jobs: int) -> None:
        """Admit everything up to a sequence without having read it: only its number is known."""
        self.seq, self.admitted = seq, QueueUsage(jobs)

    def take(self, seq: int, one: QueueUsage, limits: QuotaLimits, *, exempt: bool) -> Reason | None:
        """Take the next job. Returns the limit that it exceeds, None if it is admitted. `exempt`: it was judged elsewhere."""
        self.seq = seq
        reason = None if exempt else over(limits, self.admitted, one)
        if reason is None:
            self.admitted = self.admitted.plus(one)
        return reason
