"""Decides what a tenant may have queued as stored jobs, and announces how a job goes on.

The limits are a number, bytes and estimated prompt tokens. What was admitted once stays so. Of the jobs behind it each is
admitted if it fits beside those that still wait.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import structlog

from headrace.broker.dead_letters import note_failure
from headrace.broker.durable import metrics
from headrace.broker.durable.errors import JobMalformed, StreamIncomplete
from headrace.broker.durable.names import JobRef
from headrace.broker.durable.results import OutsideEnds, ResultStore, encode_result, refused
from headrace.broker.durable.stored_job import StoredJob, parse_job
from headrace.broker.errors import BrokerUnavailable, Overloaded
from headrace.broker.messages.durable import JobProgress, JobResult
from headrace.broker.messages.frames import JobFault
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, SubjectError
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.subjects import Subjects

# Announces how a job goes on: progress on its own subject, and a copy of its result for its publisher.

log = structlog.get_logger()

_SUBJECT = re.compile(r"[!-)+-=?-~]{1,256}\Z")  # printable, no space, no wildcard


def may_reply(subject: str, prefix: str) -> bool:
    """Decide whether a result may be sent to a subject that a publisher named: none of the server's, none of our own."""
    return bool(_SUBJECT.match(subject)) and not subject.startswith(("$", f"{prefix}.")) and ".." not in subject


class JobNotices:
    """Sends progress and copies of results. All of it may be lost."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, carrier: str) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._carrier = carrier

    def step(self, job: JobRef, event: Literal["taken", "started", "progress"], tokens: int = 0) -> None:
        """Publish a step of a job. Lines of a batch publish none: the batch counts them, and their results are messages."""
        if job.batch:
            return
        self._send(job, JobProgress(id=job.name, event=event, tokens=tokens, carrier=self._carrier))

    def finished(self, job: JobRef, result: JobResult, reply: str = "") -> None:
        """Publish the end of a job that is not a line of a batch, and send a copy of its result to `reply` if that is given."""
        if not job.batch:
            tokens = result.tokens.completion
            progress = JobProgress(id=job.name, event="finished", status=result.status, tokens=tokens, carrier=self._carrier)
            self._send(job, progress)
        if not reply:
            return
        if not may_reply(reply, self._subjects.prefix):
            log.warning("job.reply_refused", stored_job=job.id, tenant=job.tenant, subject=reply[:256])
            return
        try:
            self._messaging.send(reply, encode_result(result))
        except PayloadTooLarge as error:
            log.warning("job.reply_refused", stored_job=job.id, tenant=job.tenant, error=str(error))

    def _send(self, job: JobRef, progress: JobProgress) -> None:
        self._messaging.send(self._subjects.job_events(job.tenant, job.token), msgspec.json.encode(progress))


BYTES_PER_TOKEN = 4  # for the estimate, as for lines of batches

Reason = Literal["tenant_jobs", "tenant_job_bytes", "tenant_job_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    jobs: int = 0
    bytes: int = 0
    tokens: int = 0

    @property
    def reads(self) -> bool:
        return bool(self.bytes or self.tokens)


class QueueUsage(NamedTuple):
    """The jobs of a tenant, their bytes and their estimated prompt tokens."""

    jobs: int = 0
    bytes: int = 0
    tokens: int = 0

    def plus(self, other: QueueUsage) -> QueueUsage:
        return QueueUsage(self.jobs + other.jobs, self.bytes + other.bytes, self.tokens + other.tokens)


NOTHING = QueueUsage()


def usage_of(size: int, job: StoredJob | None = None) -> QueueUsage:
    """Return the usage of one message. Envelopes are estimated in the same way as texts."""
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
    most, what = {
        "tenant_jobs": (limits.jobs, "jobs"),
        "tenant_job_bytes": (limits.bytes, "bytes of jobs"),
        "tenant_job_tokens": (limits.tokens, "estimated prompt tokens of jobs"),
    }[reason]
    return f"This tenant may have {most} {what} queued. Try again once some of its jobs have ended."


@dataclass(slots=True)
class TenantLedger:
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


# Holds the quotas of tenants on queued jobs: frontends ask before they store one, a sweep ends what publishers stored beyond.
#
# Direct publishers write to the stream themselves, so theirs are judged after the ack: a job over the quota has a typed error
# as its result, and leaves the queue. Lines of batches are judged by the quotas of batches, and count here.


SWEEP_S = 10.0
PAGE = 500  # jobs that are read at once
REST_S = 0.02  # between two pages, so that a long queue does not keep the event loop busy
RETRY_AFTER_S = 5.0


class QueueQuotas:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        limits: QuotaLimits,
        *,
        is_line: Callable[[str, str], bool] = lambda _tenant, _batch: False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`is_line(tenant, batch)`: whether the batch exists; its lines were then judged by the quotas of batches."""
        self._messaging = messaging
        self._subjects = subjects
        self._limits = limits
        self._is_line = is_line
        self._wall = wall
        self._stream = subjects.stream("JOB")
        self._results = ResultStore(messaging, subjects)
        self._ends = OutsideEnds(messaging, subjects, self._results, wall=wall)
        self._notices = JobNotices(messaging, subjects, carrier="")
        self._ledgers: dict[str, TenantLedger] = {}

    @property
    def wanted(self) -> bool:
        return bool(self._limits.jobs or self._limits.reads)

    async def check(self, tenant: str, size: int) -> None:
        """Check that a tenant may queue one more job with so many bytes of body. Raises Overloaded, BrokerUnavailable."""
        if not self.wanted:
            return
        try:
            waiting = sum((await self._messaging.subject_counts(self._stream, self._pattern(tenant))).values())
            used = await self._used(tenant, waiting) if self._limits.reads and waiting else QueueUsage(waiting)
        except JetStreamError as error:
            raise BrokerUnavailable(f"the queue of jobs cannot be read: {error}") from error
        if (reason := over(self._limits, used, usage_of(size))) is not None:
            metrics.OVER_QUOTA.labels(reason, "refused").inc()
            raise Overloaded(message_of(reason, self._limits), reason=reason, retry_after_s=RETRY_AFTER_S)

    async def _used(self, tenant: str, waiting: int) -> QueueUsage:
        ledger = self._ledgers.get(tenant, TenantLedger())
        fresh = [usage_of(len(message.data)) for message in await self._behind(tenant, ledger.seq)]
        now = TenantLedger(ledger.seq, ledger.admitted)
        now.settle(waiting - len(fresh))
        used = now.admitted
        for one in fresh:
            used = used.plus(one)
        return used

    async def run(self, may_act: Callable[[], bool]) -> None:
        """Sweep until cancelled, while `may_act()` is True. Several frontends may: what one has ended is gone."""
        while self.wanted:
            await asyncio.sleep(SWEEP_S * (0.5 + random.random()))  # noqa: S311 - it spreads the load
            if may_act():
                try:
                    await self.sweep()
                except JetStreamError as error:
                    log.info("quotas.not_swept", error=str(error))
                except Exception as error:  # a job that nothing foresaw must not end the frontend
                    note_failure("quota", error)

    async def sweep(self) -> int:
        """Look at what has come to all queues. Returns the number of jobs that were ended. Raises JetStreamError."""
        last_seq = (await self._messaging.stream_state(self._stream)).last_seq
        waiting: dict[str, int] = {}
        for subject, count in (await self._messaging.subject_counts(self._stream, self._subjects.all_jobs())).items():
            try:
                tenant = self._subjects.parse_job(subject).tenant
            except SubjectError:  # nothing reads there; `broker/durable/carrier.py` logs it
                continue
            waiting[tenant] = waiting.get(tenant, 0) + count
        self._ledgers = {tenant: self._ledgers.get(tenant, TenantLedger()) for tenant in waiting}
        return sum([await self._sweep_tenant(tenant, count, last_seq) for tenant, count in waiting.items()])

    async def _sweep_tenant(self, tenant: str, waiting: int, last_seq: int) -> int:
        ledger = self._ledgers[tenant]
        if not self._limits.reads and waiting <= self._limits.jobs:
            ledger.admit_all(last_seq, waiting)
            return 0
        fresh = await self._behind(tenant, ledger.seq)
        ledger.settle(waiting - len(fresh))
        ended = 0
        for message in fresh:
            job = self._read(tenant, message)
            exempt = job is None or bool(job.batch and self._is_line(tenant, job.batch))
            reason = ledger.take(message.seq, usage_of(len(message.data), job), self._limits, exempt=exempt)
            if reason is not None and job is not None:
                ended += await self._end(job, message, reason)
        return ended

    def _read(self, tenant: str, message: StoredMessage) -> StoredJob | None:
        try:
            return parse_job(message.data, message.headers or {}, tenant=tenant, seq=message.seq, stored=message.at)
        except JobMalformed:
            return None

    async def _end(self, job: StoredJob, message: StoredMessage, reason: Reason) -> bool:
        text = message_of(reason, self._limits)
        result = refused(job.ref, status_code=429, code=reason, message=text, now=self._wall())
        try:
            status = await self._ends.end(job.ref, result, JobFault(reason, text))
        except StreamIncomplete as error:
            log.error("stream.incomplete", stored_job=job.id, tenant=job.tenant, error=str(error))
            return False
        metrics.OVER_QUOTA.labels(reason, "ended").inc()
        log.warning("job.over_quota", stored_job=job.id, tenant=job.tenant, reason=reason, status=status)
        stands = await self._results.get(job.tenant, job.token)
        if stands is not None:  # of a stream that had ended well its carrier makes the result
            await self._messaging.delete_message(self._stream, message.seq)
            self._notices.finished(job.ref, stands, job.reply)
        return True

    async def _behind(self, tenant: str, seq: int) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        while True:
            page = await self._messaging.subject_messages(
                self._stream, self._pattern(tenant), limit=PAGE, start_seq=(found[-1].seq if found else seq) + 1
            )
            found += page
            if len(page) < PAGE:
                return found
            await asyncio.sleep(REST_S)

    def _pattern(self, tenant: str) -> str:
        return f"{self._subjects.prefix}.job.*.{tenant}"
