"""What an ingress stores of its open requests after the first time, until it is stored: copies of them, and dead letters."""

from __future__ import annotations

import random
from collections.abc import Callable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import encode, job_headers
from headrace.broker.ingress.open_jobs import OpenJob
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages import DeadLetter, HistoryEntry
from headrace.broker.protocol.judge import JobRecord
from headrace.broker.retry import until_done
from headrace.broker.settings import Timing
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()


class Resubmitter:
    """`wall` gives Unix time."""

    def __init__(self, messaging: Messaging, subjects: Subjects, timing: Timing, *, wall: Callable[[], float]) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._timing = timing
        self._wall = wall

    async def submit(self, job: OpenJob, attempt: int, history: list[HistoryEntry], *, wanted: Callable[[], bool]) -> None:
        """Again, as this attempt, while it is `wanted`."""
        log.warning("job.resubmitted", request_id=job.id, attempt=attempt)
        metrics.RESUBMITTED.inc()
        nonce = f"{random.getrandbits(32):08x}"  # a nonce, not a secret

        async def publish() -> None:
            await self._messaging.publish(
                self._subjects.req(job.pool, "re", job.tenant),
                job.body,
                headers=job_headers(attempt, history),
                msg_id=f"{job.id}.{attempt}@{nonce}",
                ttl_s=message_ttl_s(job.deadline, self._wall(), self._timing.ttl_slack_s),
                timeout_s=self._timing.publish_timeout_s,
            )

        await until_done(publish, event="resubmit.retry", retry_s=self._timing.retry_s, wanted=wanted, request_id=job.id)

    async def bury(self, pool: str, request_id: str, letter: bytes) -> None:
        """Store a dead letter."""

        async def publish() -> None:
            await self._messaging.publish(self._subjects.dlq(pool), letter, msg_id=f"{request_id}.dlq")

        await until_done(publish, event="deadletter.retry", retry_s=self._timing.retry_s, request_id=request_id)


def poison_letter(job: OpenJob, record: JobRecord, crashes: int, *, at: float) -> bytes:
    """The dead letter of a request under which so many workers have died."""
    history = sorted_history(record)
    log.error("job.poisoned", request_id=record.id, crashes=crashes, history=[[h.attempt, h.worker] for h in history])
    return encode(DeadLetter(envelope=job.envelope(), reason="poison", attempt=record.attempt, history=history, at=at))


def sorted_history(record: JobRecord) -> list[HistoryEntry]:
    """The workers that have had it, in order."""
    return sorted(record.history, key=lambda entry: (entry.attempt, entry.worker))
