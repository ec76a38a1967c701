"""Announces how a job goes on: progress on its own subject, and a copy of its result for its publisher."""

from __future__ import annotations

import re
from typing import Literal

import msgspec
import structlog

from headrace.broker.durable.names import JobRef
from headrace.broker.durable.results import encode_result
from headrace.broker.messages.durable import JobProgress, JobResult
from headrace.jetstream.errors import PayloadTooLarge
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

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
