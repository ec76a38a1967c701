"""Submits the open requests of an ingress again when the broker may have lost or dropped the stored ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import structlog

from headrace.broker import metrics
from headrace.broker.codec import job_headers
from headrace.broker.ingress.open_jobs import OpenJob, OpenJobs
from headrace.broker.log_ids import log_ids
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages import HistoryEntry
from headrace.broker.protocol.judge import Judge
from headrace.broker.retry import until_done
from headrace.broker.settings import Timing
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects, moved_class
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()


class Resubmitter:
    """Publishes new generations of open requests: after a lapse of the ingress's lease, or on request."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        judge: Judge,
        open_jobs: OpenJobs,
        tasks: TaskScope,
        *,
        timing: Timing,
        wall: Callable[[], float],
    ) -> None:
        """`wall` gives Unix time."""
        self._messaging = messaging
        self._subjects = subjects
        self._judge = judge
        self._open = open_jobs
        self._tasks = tasks
        self._timing = timing
        self._wall = wall
        self._lapsed = False

    def on_lease(self, held: bool) -> None:
        """Handle that the ingress's lease was gained (`held`) or lapsed."""
        if held:
            self.on_gained()
        else:
            self.on_lapse()

    def on_lapse(self) -> None:
        """Note that the lease has lapsed."""
        metrics.LEASE_LAPSES.labels("ingress").inc()
        self._lapsed = True

    def on_gained(self) -> None:
        """Submit every open request again if the lease had lapsed: workers may have dropped them, as those of a dead judge.

        It must not be done before the lease is held again: a worker that reads a copy while there is no lease drops that, too.
        """
        if self._lapsed and self._tasks.is_open:
            self._lapsed = False
            self.resubmit()

    def resubmit(self) -> None:
        """Submit every open request again, as a new generation, because the broker may have lost the stored one."""
        if not self._tasks.is_open:
            return
        for record, attempt in self._judge.on_lapse():
            job = self._open.get(record.id)
            if job is not None:
                self._tasks.spawn(self._submit(job, attempt, sorted(record.history)))

    async def _submit(self, job: OpenJob, attempt: int, history: list[HistoryEntry]) -> None:
        """Publish `job` as this attempt, and retry until it is stored or the request has ended."""
        log.warning("job.resubmitted", **log_ids(job), attempt=attempt)
        metrics.RESUBMITTED.inc()
        envelope = job.envelope()
        subject = self._subjects.req(job.pool, moved_class(envelope.request_class), job.tenant)
        headers = job_headers(attempt, history)
        nonce = f"{random.getrandbits(32):08x}"  # a nonce, not a secret

        async def publish() -> None:
            await self._messaging.publish(
                subject,
                job.body,
                headers=headers,
                msg_id=f"{job.id}.{attempt}@{nonce}",
                ttl_s=message_ttl_s(job.deadline, self._wall(), self._timing.ttl_slack_s),
                timeout_s=self._timing.publish_timeout_s,
            )

        wanted = partial(self._is_open, job.id)
        await until_done(publish, event="resubmit.retry", retry_s=self._timing.retry_s, wanted=wanted, request_id=job.id)

    def _is_open(self, request_id: str) -> bool:
        return self._judge.get(request_id) is not None
