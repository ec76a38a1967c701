"""Refusals: the judge of a request that will not be placed is asked to end it, and only its answer allows the ack."""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker import metrics as broker_metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import DeadlineExceeded, WireError
from headrace.broker.failed_deliveries import FailedDeliveries
from headrace.broker.log_ids import log_ids
from headrace.broker.messages import JobFault, Refuse, RefuseReply
from headrace.jetstream.errors import NoResponder, NotConnected, RequestTimeout
from headrace.jetstream.tasks import TaskScope
from headrace.router.placement.types import Shed
from headrace.router.session import metrics
from headrace.router.session.deps import RouterDeps
from headrace.router.session.held_request import HeldRequest
from headrace.router.session.release import RequestRelease
from headrace.router.session.state import ServingPermission

log = structlog.get_logger()

RETRY_AFTER_S = 1.0


def fault_of(shed: Shed) -> JobFault:
    """Translate a scheduler's refusal for the client. Without a time to wait it would count as a failure of the engine."""
    if shed.code == "deadline":
        return JobFault(DeadlineExceeded.code, shed.message, retriable=True)
    after_s = shed.retry_after_s if shed.retry_after_s is not None else RETRY_AFTER_S
    return JobFault(shed.code, shed.message, retriable=True, retry_after_s=after_s)


class Refuser:
    """Refuses requests of one pool, at most `max_refusing` at once, each in a task of `tasks`."""

    def __init__(self, deps: RouterDeps, tasks: TaskScope, permission: ServingPermission, release: RequestRelease) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._members = deps.members
        self._timing = deps.options.timing
        self._slots = asyncio.Semaphore(deps.options.max_refusing)
        self._tasks = tasks
        self._permission = permission
        self._release = release
        self._failures = FailedDeliveries(deps.messaging, deps.subjects, pool=deps.pool, kind="refusal", wall=deps.wall)
        self.in_flight = 0
        self._running: set[asyncio.Task[None]] = set()

    def refuse(self, held: HeldRequest, fault: JobFault) -> None:
        """Begin to ask the judge of this request to end it with `fault`."""
        held.refuse()
        self.in_flight += 1
        task = self._tasks.spawn_guarded(self._refuse(held, fault), lambda error: self._failed(held, error))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _failed(self, held: HeldRequest, error: Exception) -> None:
        self._failures.bury(held.delivery, error)
        self._release.settle(held, "failed")

    def abandon(self) -> None:
        """Stop asking. The server delivers again what was not acked."""
        for task in self._running:
            task.cancel()

    async def _refuse(self, held: HeldRequest, fault: JobFault) -> None:
        try:
            async with self._slots:
                verdict = await self._ask(held, fault)
        finally:
            self.in_flight -= 1
        if verdict is None:
            self._release.give_back(held)
            return
        metrics.SHED.labels(fault.code).inc()
        log.info("request.shed", **log_ids(held.head), code=fault.code, verdict=verdict, tenant=held.head.tenant)
        self._release.settle(held, "refused")

    async def _ask(self, held: HeldRequest, fault: JobFault) -> str | None:
        """Return the judge's verdict, or `judge gone`; None if this router may not work any more before there is one."""
        judge = held.head.judge
        subject = self._subjects.judge(judge)
        question = encode(Refuse(id=held.id, attempt=held.attempt, fault=fault))
        while self._permission.granted:
            try:
                answer = await self._messaging.request(subject, question, timeout_s=self._timing.rpc_timeout_s)
                return decode(RefuseReply, answer).verdict
            except (NoResponder, RequestTimeout, NotConnected) as error:
                # Silence is a suspicion, never a verdict.
                log.debug("judge.silent", judge=judge, error=str(error))
            except WireError as error:
                broker_metrics.MALFORMED.labels("reply").inc()
                log.error("reply.malformed", judge=judge, error=str(error))
            if await self._members.ingress_gone(judge):
                return "judge gone"
            await asyncio.sleep(self._timing.retry_s)
        return None
