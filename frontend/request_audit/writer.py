"""Writes records of ended requests into the audit stream, behind a bounded queue: what finds it full is dropped and counted."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import structlog

from headrace.broker.codec import encode
from headrace.frontend.metrics import Metrics
from headrace.frontend.request_audit.policy import AuditPolicy, Ended
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

MOST_WAITING = 4096
MOST_WAITING_WITH_CONTENT = 1024
AT_ONCE = 32
AGAIN_S = 1.0  # until a record is published again that the broker did not take
LAST_WORDS_S = 2.0  # at the end, for what waits
COMPLAIN_EVERY_S = 60.0


class AuditWriter:
    """The audit records of one frontend."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        policy: AuditPolicy,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._policy = policy
        self._clock = clock
        self._most = MOST_WAITING_WITH_CONTENT if policy.content else MOST_WAITING
        self._waiting: deque[Ended] = deque()
        self._woken = asyncio.Event()
        self._written, self._dropped = (metrics.audit_records.labels(outcome) for outcome in ("written", "dropped"))
        self._dropped_now = 0
        self._complained_s = -COMPLAIN_EVERY_S

    @property
    def content(self) -> bool:
        """True where the words of requests and answers are wanted."""
        return self._policy.content

    def note(self, ended: Ended) -> None:
        """Keep an ended request until it is written; drop it where too many wait."""
        if len(self._waiting) >= self._most:
            self._drop("too many wait")
            return
        self._waiting.append(ended)
        self._woken.set()

    async def run(self) -> None:
        """Write until cancelled; then what waits is tried once more."""
        try:
            while True:
                await self._woken.wait()
                while self._waiting:
                    if not await self._write(self._taken()):
                        await asyncio.sleep(AGAIN_S)
                self._woken.clear()
        finally:
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    while self._waiting and await self._write(self._taken()):
                        pass
            except TimeoutError:
                pass
            for _ in self._waiting:
                self._drop("the frontend ends")

    def _taken(self) -> list[Ended]:
        return [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]

    async def _write(self, taken: list[Ended]) -> bool:
        """Write these at once. What the broker did not take waits again; returns False if there is some."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._publish(one)) for one in taken]
        left = [one for one, task in zip(taken, tasks, strict=True) if not task.result()]
        self._waiting.extendleft(reversed(left))
        return not left

    async def _publish(self, ended: Ended) -> bool:
        record = self._policy.record(ended)
        try:
            await self._messaging.publish(self._subjects.audit_record(record.tenant), encode(record), msg_id=record.id)
        except PayloadTooLarge:
            self._drop("it is too large for a message")
        except JetStreamError as error:
            self._complain("audit.not_written", error=str(error), waiting=len(self._waiting))
            return False
        else:
            self._written.inc()
        return True

    def _drop(self, why: str) -> None:
        self._dropped.inc()
        self._dropped_now += 1
        self._complain("audit.dropped", why=why)

    def _complain(self, event: str, **fields: object) -> None:
        now_s = self._clock()
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            log.warning(event, **fields, dropped=self._dropped_now)
            self._dropped_now = 0
