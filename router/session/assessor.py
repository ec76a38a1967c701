"""Asks judges how suspect requests are whose history has several crashes: some of them may not count, or are forgiven."""

from __future__ import annotations

import structlog

from headrace.broker import metrics as broker_metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.failed_deliveries import note_failure
from headrace.broker.log_ids import log_ids
from headrace.broker.messages import Suspicion, SuspicionQuery
from headrace.broker.protocol.group_testing import limit_by_header
from headrace.jetstream.errors import NoResponder, NotConnected, RequestTimeout
from headrace.jetstream.tasks import TaskScope
from headrace.router.session.deps import RouterDeps
from headrace.router.session.held_request import HeldRequest
from headrace.router.session.state import RouterState

log = structlog.get_logger()


class Assessor:
    """Tells the scheduler how suspect the requests of one pool are, each question in a task of `tasks`."""

    def __init__(self, deps: RouterDeps, tasks: TaskScope, state: RouterState) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._timeout_s = deps.options.timing.rpc_timeout_s
        self._tasks = tasks
        self._scheduler = state.scheduler
        self._changed = state.changed

    def ask(self, held: HeldRequest) -> None:
        """Begin to ask the judge of a request that waits. The scheduler does not place it before it knows."""
        self._tasks.spawn_guarded(self._ask(held), lambda error: note_failure("suspicion", error, **log_ids(held.head)))

    async def _ask(self, held: HeldRequest) -> None:
        found = await self._suspicion(held)
        self._scheduler.assess(held.id, limit=found.limit, crashes=found.crashes)
        self._changed.set()

    async def _suspicion(self, held: HeldRequest) -> Suspicion:
        """Return the judge's answer, or without one what the history says at worst."""
        question = encode(SuspicionQuery(id=held.id, history=held.history))
        try:
            answer = await self._messaging.request(self._subjects.judge(held.head.judge), question, timeout_s=self._timeout_s)
            return decode(Suspicion, answer)
        except (NoResponder, RequestTimeout, NotConnected) as error:
            log.info("suspicion.unanswered", **log_ids(held.head), judge=held.head.judge, error=str(error))
        except WireError as error:
            broker_metrics.MALFORMED.labels("reply").inc()
            log.error("reply.malformed", judge=held.head.judge, error=str(error))
        return Suspicion(limit=limit_by_header(held.history), crashes=len(held.history))
