"""Publishing of placed requests to their workers, many at once.

An outcome that is not known is tried again on the same subject under the same message id until it is known: another worker in
its place could mean two copies.  Nothing in the protocol's safety rests on this; it saves work.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from headrace.broker.codec import job_headers, prefill_header
from headrace.broker.failed_deliveries import fault_of_failure, note_failure
from headrace.broker.log_ids import log_ids
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages import HEADER_KEPT, HEADER_RANK, JobFault
from headrace.broker.places import rank_of, worker_of
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, QueueFull
from headrace.jetstream.tasks import TaskScope
from headrace.router.placement.types import Placement
from headrace.router.session import metrics
from headrace.router.session.deps import RouterDeps
from headrace.router.session.held_request import HeldRequest
from headrace.router.session.placement_outcomes import PlacementOutcomes

log = structlog.get_logger()


class Placer:
    """Carries out the placements of one pool, each in a task of `tasks`."""

    def __init__(self, deps: RouterDeps, tasks: TaskScope, outcomes: PlacementOutcomes) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._pool = deps.pool
        self._timing = deps.options.timing
        self._wall = deps.wall
        self._tasks = tasks
        self._outcomes = outcomes
        self._gauge = metrics.IN_FLIGHT.labels(deps.pool)
        self.in_flight = 0
        self._running: set[asyncio.Task[None]] = set()

    def place(self, held: HeldRequest, placement: Placement) -> None:
        """Begin to publish a waiting request to its worker."""
        held.place()
        self.in_flight += 1
        self._gauge.inc()
        task = self._tasks.spawn_guarded(self._place(held, placement), lambda error: self._failed(held, error))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _failed(self, held: HeldRequest, error: Exception) -> None:
        """Refuse a request that cannot be placed for a reason that no check has foreseen: it must not end the router."""
        note_failure("place", error, **log_ids(held.head))
        self._outcomes.impossible(held, fault_of_failure(error))

    def abandon(self) -> None:
        """Stop waiting for outcomes. The server delivers again what was not acked."""
        for task in self._running:
            task.cancel()

    async def _place(self, held: HeldRequest, placement: Placement) -> None:
        try:
            outcome = await self._publish(held, placement)
        finally:
            self.in_flight -= 1
            self._gauge.dec()
        if isinstance(outcome, JobFault):
            self._outcomes.impossible(held, outcome)
        elif outcome == "full":
            metrics.RETRIES.labels("queue_full").inc()
            await asyncio.sleep(self._timing.retry_s)  # the scheduler counts it there meanwhile and takes another one
            self._outcomes.full(held, placement)
        else:
            self._outcomes.placed(held, placement, duplicate=outcome == "duplicate")

    async def _publish(self, held: HeldRequest, placement: Placement) -> str | JobFault:
        """Return `stored`, `duplicate`, `full`, or the fault of a message that the server can never store."""
        subject = self._subjects.work(self._pool, worker_of(placement.worker))
        headers = job_headers(held.attempt, held.history)
        if (rank := rank_of(placement.worker)) is not None:
            headers[HEADER_RANK] = str(rank)
        if (prefill := placement.prefill) is not None:
            named = msgspec.structs.replace(prefill, worker=worker_of(prefill.worker), rank=rank_of(prefill.worker))
            headers |= prefill_header(named)
        if placement.kept:
            headers[HEADER_KEPT] = "1"
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
                log.warning("place.retry", **log_ids(held.head), attempt=held.attempt, error=str(error))
                await asyncio.sleep(self._timing.retry_s)
            else:
                return "duplicate" if ack.duplicate else "stored"
