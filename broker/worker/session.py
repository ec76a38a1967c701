"""The worker's half of the job protocol: constructs the parts of a session in the order in which data flows, and runs them.

The parts decide what may run and what may be sent; the executor runs it.  Everything happens on one event loop, so the run
table is always consistent between two awaits.
"""

from __future__ import annotations

import asyncio
import contextlib

from headrace.broker.messages.members import WorkerMember
from headrace.broker.prefill_client import PrefillClient
from headrace.broker.prefill_server import PrefillServer
from headrace.broker.worker.inbox import Inbox
from headrace.broker.worker.intake import Intake, Preemption
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.presence import Presence
from headrace.broker.worker.quarantine import Quarantine
from headrace.broker.worker.reports import Reports
from headrace.broker.worker.runs import Admission, WorkerRuns
from headrace.broker.worker.service import Service
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.tasks import TaskScope


class WorkerSession:
    """A worker of one pool. Start the engine first: while `run` runs, the worker is registered and takes work.

    `runs` takes what the engine makes of them, `service` carries out the commands of operators.
    """

    def __init__(self, deps: WorkerDeps, member: WorkerMember, engine: EnginePorts) -> None:
        self._deps = deps
        tasks = self._tasks = TaskScope()
        presence = self.presence = Presence(deps, member, engine.kv)
        reports = self._reports = Reports(deps, pool=member.pool, worker=member.worker)
        runs = self.runs = WorkerRuns(deps, presence, reports, engine.executor, tasks)
        self._quarantine = Quarantine(deps, presence, runs, tasks)
        self.prefill_client = PrefillClient(deps, presence.members, pool=member.pool, worker=member.worker)
        prefill = self.prefill_server = self._make_prefill_server(engine)
        self._preemption = Preemption(deps, presence, runs)
        admission = Admission(deps, presence, runs, tasks)
        self.intake = Intake(deps, presence, runs, admission, self._preemption, reports, prefill)
        self.service = Service(deps, presence, runs, self.intake, engine, prefill, tasks)
        self._inbox = Inbox(deps, presence, runs, self.service, self.prefill_client, prefill, engine.encode)
        if prefill is not None:
            presence.on_change(prefill.balance)
        presence.on_change(reports.load_changed)

    def _make_prefill_server(self, engine: EnginePorts) -> PrefillServer | None:
        if engine.prefill is None:
            return None
        presence, lease = self.presence, self.presence.lease

        def may_take() -> bool:
            return presence.taking and not presence.serves and lease.held

        pool, worker = presence.pool, presence.worker
        return PrefillServer(self._deps, presence.members, lease, engine.prefill, pool=pool, worker=worker, may_take=may_take)

    async def run(self) -> None:
        """Serve until the worker was drained, or its engine has died."""
        await self.intake.ensure_consumers()
        self._deps.messaging.on_reconnect(self.intake.ensure_consumers)
        await self._inbox.subscribe()
        runs, preemption = self.runs, self._preemption
        async with self._tasks:
            parts = [
                *self.presence.parts(),
                self.intake.run(),
                runs.extend_claims(),
                runs.tick(self._quarantine.tick),
                preemption.run(),
                self._reports.run(lambda n: runs.load_report(n, preemption.yielding())),
                self.prefill_client.run(),
            ]
            if self.prefill_server is not None:
                parts.append(self.prefill_server.run())
            serving = [self._tasks.spawn(part) for part in parts]
            await self.service.done.wait()
            for task in serving:
                task.cancel()
        with contextlib.suppress(JetStreamError, TimeoutError):
            async with asyncio.timeout(self._deps.timing.rpc_timeout_s):
                await self.presence.lease.release()
                await self.intake.forget_consumers()

    async def wait_registered(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not self.presence.lease.held:
                await asyncio.sleep(0.01)
