"""Ends requests that will not be placed: one atomic question to the judge, and only its answer allows the ack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.broker import metrics as broker_metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import DeadlineExceeded, WireError
from headrace.broker.membership.members import Members
from headrace.broker.messages import JobFault, Refuse, RefuseReply
from headrace.broker.settings import Timing
from headrace.jetstream.errors import NoResponder, NotConnected, RequestTimeout
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.placement.types import Shed
from headrace.router.session import metrics
from headrace.router.session.window import HeldRequest

log = structlog.get_logger()

RETRY_AFTER_S = 1.0


def fault_of(shed: Shed) -> JobFault:
    """As the client is to see it. Without a time to wait it would count as a failure of the engine."""
    if shed.code == "deadline":
        return JobFault(DeadlineExceeded.code, shed.message, retriable=True)
    after_s = shed.retry_after_s if shed.retry_after_s is not None else RETRY_AFTER_S
    return JobFault(shed.code, shed.message, retriable=True, retry_after_s=after_s)


class Refuser:
    """Refusals of one pool, a bounded number at once. `tasks` must be set before the first one."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        members: Members,
        *,
        timing: Timing,
        limit: int,
        lease_held: Callable[[], bool],
        on_settled: Callable[[HeldRequest], None],
        on_let_go: Callable[[HeldRequest], None],
    ) -> None:
        """`on_settled`: the judge has said something, or is gone. `on_let_go`: this router may not speak any more."""
        self._messaging = messaging
        self._subjects = subjects
        self._members = members
        self._timing = timing
        self._turns = asyncio.Semaphore(limit)
        self._lease_held = lease_held
        self._on_settled = on_settled
        self._on_let_go = on_let_go
        self.tasks: asyncio.TaskGroup | None = None
        self.in_flight = 0
        self._running: set[asyncio.Task[None]] = set()

    def refuse(self, held: HeldRequest, fault: JobFault) -> None:
        if self.tasks is None:
            return
        held.state = "refusing"
        self.in_flight += 1
        task = self.tasks.create_task(self._refuse(held, fault))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def abandon(self) -> None:
        """Stop asking. What was not acked is delivered again, to somebody."""
        for task in self._running:
            task.cancel()

    async def _refuse(self, held: HeldRequest, fault: JobFault) -> None:
        try:
            async with self._turns:
                verdict = await self._ask(held, fault)
        finally:
            self.in_flight -= 1
        if verdict is None:
            self._on_let_go(held)
            return
        metrics.SHED.labels(fault.code).inc()
        log.info("request.shed", request_id=held.id, code=fault.code, verdict=verdict, tenant=held.head.tenant)
        self._on_settled(held)

    async def _ask(self, held: HeldRequest, fault: JobFault) -> str | None:
        """The judge's verdict, or `judge gone`. None when this router's lease is lost first."""
        judge = held.head.judge
        subject = self._subjects.control(judge)
        question = encode(Refuse(id=held.id, attempt=held.attempt, fault=fault))
        while self._lease_held():
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
