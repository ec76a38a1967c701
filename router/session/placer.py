"""Carries out placements: publish to the worker, tell everybody, ack the request. Many at once.

An outcome that is not known is tried again on the same subject under the same message id until it is known: another worker in
its place could mean two copies.  Nothing in the protocol's safety rests on this; it saves work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace.broker.codec import job_headers, prefill_header
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages import JobFault
from headrace.broker.settings import Timing
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, QueueFull
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.placement.types import Placement
from headrace.router.session import metrics
from headrace.router.session.placement_events import Announcer
from headrace.router.session.window import HeldRequest

log = structlog.get_logger()


class Placer:
    """Placements of one pool. `tasks` must be set before the first one."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        announcer: Announcer,
        *,
        pool: str,
        timing: Timing,
        on_placed: Callable[[HeldRequest, Placement], None],
        on_full: Callable[[HeldRequest, Placement], None],
        on_impossible: Callable[[HeldRequest, JobFault], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`on_placed`: it is stored for its worker. `on_full`: that worker's queue takes nothing more."""
        self._messaging = messaging
        self._subjects = subjects
        self._announcer = announcer
        self._pool = pool
        self._timing = timing
        self._on_placed = on_placed
        self._on_full = on_full
        self._on_impossible = on_impossible
        self._wall = wall
        self._gauge = metrics.IN_FLIGHT.labels(pool)
        self.tasks: asyncio.TaskGroup | None = None
        self.in_flight = 0
        self._running: set[asyncio.Task[None]] = set()

    def place(self, held: HeldRequest, placement: Placement) -> None:
        if self.tasks is None:
            return
        held.state = "placing"
        self.in_flight += 1
        self._gauge.inc()
        task = self.tasks.create_task(self._place(held, placement))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def abandon(self) -> None:
        """Stop waiting for outcomes. What was not acked is delivered again, to somebody."""
        for task in self._running:
            task.cancel()

    async def _place(self, held: HeldRequest, placement: Placement) -> None:
        try:
            outcome = await self._publish(held, placement)
        finally:
            self.in_flight -= 1
            self._gauge.dec()
        if isinstance(outcome, JobFault):
            self._on_impossible(held, outcome)
        elif outcome == "full":
            metrics.RETRIES.labels("queue_full").inc()
            await asyncio.sleep(self._timing.retry_s)  # the scheduler counts it there meanwhile and takes another one
            self._on_full(held, placement)
        else:
            if outcome == "stored":
                self._announcer.placed(held, placement)
            self._on_placed(held, placement)

    async def _publish(self, held: HeldRequest, placement: Placement) -> str | JobFault:
        subject = self._subjects.work(self._pool, placement.worker)
        headers = job_headers(held.attempt, held.history)
        if placement.prefill is not None:
            headers |= prefill_header(placement.prefill)
        msg_id = f"{held.id}.{held.attempt}@{held.delivery.stream_seq}"
        while True:
            try:
                ack = await self._messaging.publish(
                    subject,
                    held.delivery.data,
                    headers=headers,
                    msg_id=msg_id,
                    ttl_s=message_ttl_s(held.head.deadline, self._wall(), self._timing.ttl_slack_s),
                    timeout_s=self._timing.publish_timeout_s,
                )
            except QueueFull:
                return "full"
            except PayloadTooLarge as error:  # its headers have grown beyond what the server takes
                return JobFault("engine_error", f"the request cannot be placed: {error}")
            except JetStreamError as error:
                metrics.RETRIES.labels("unknown").inc()
                log.warning("place.retry", request_id=held.id, attempt=held.attempt, error=str(error))
                await asyncio.sleep(self._timing.retry_s)
            else:
                return "duplicate" if ack.duplicate else "stored"
