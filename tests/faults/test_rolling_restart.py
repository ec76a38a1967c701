"""Every worker, router and frontend is replaced, one after the other, under load.

Promised: no request fails or is refused for a worker or a router that leaves. A frontend takes no new connections from then on,
which a client sees at once and goes to the other one; every answer that has begun ends well within its grace period.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.client import LedgerClient
from headrace.tools.chaos.deployment import MODEL, ChaosDeployment, DeploymentShape, Process, until_at_rest, until_well
from headrace.tools.chaos.ledger import Injury, Ledger, Outcome
from headrace.tools.chaos.questions import draw_questions

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

NAMES = Subjects()
WELL_S = 120.0
CLIENTS = 6
FRONTEND_GRACE_S = 60.0  # longer than any answer takes


class Rolling:
    """One deployment, its load, and the restarts."""

    def __init__(self, deployment: ChaosDeployment, connection: Connection) -> None:
        self.deployment = deployment
        self.connection = connection
        self.ledger = Ledger()
        self.client = LedgerClient(
            self.ledger, draw_questions(5, longest=200), deployment.frontends, model=MODEL, clock=time.monotonic
        )

    async def well(self) -> None:
        assert await until_well(self.deployment, self.connection, NAMES, timeout_s=WELL_S)

    async def restart(self, process: Process) -> None:
        """Its clean end, and the next one at work in its place."""
        began = process.started
        assert await self.deployment.drain(process, timeout_s=FRONTEND_GRACE_S + 30), f"{process.name} did not leave"
        await self.well()
        assert process.started > began

    async def answered_more(self, n: int) -> None:
        wanted = self.ledger.counts()[Outcome.ANSWERED] + n
        async with asyncio.timeout(60):
            while self.ledger.counts()[Outcome.ANSWERED] < wanted:
                await asyncio.sleep(0.05)

    def outcomes(self) -> set[Outcome]:
        return {entry.outcome for entry in self.ledger if entry.outcome is not Outcome.OPEN}

    def trouble(self) -> str:
        return "\n".join(f"{entry.outcome}: {entry.detail}" for entry in self.ledger if entry.detail)


async def test_a_rolling_restart_of_everything_fails_no_request(tmp_path: Path) -> None:
    shape = DeploymentShape(workers=2, routers=2, frontends=2, frontend_grace_s=FRONTEND_GRACE_S)
    async with ChaosDeployment(tmp_path, shape) as deployment:
        options = ConnectOptions(servers=(deployment.server.url,))
        async with await Connection.connect(options, subjects=NAMES) as connection:
            rolling = Rolling(deployment, connection)
            await rolling.well()
            load = asyncio.create_task(rolling.client.run(CLIENTS))
            try:
                await rolling.answered_more(CLIENTS)
                for process in (*deployment.of_kind("worker"), *deployment.of_kind("router")):
                    await rolling.restart(process)
                    await rolling.answered_more(CLIENTS)
                assert rolling.outcomes() <= {Outcome.ANSWERED, Outcome.CANCELLED}, rolling.trouble()
                for process in deployment.of_kind("frontend"):
                    injury = rolling.ledger.injure(Injury("frontend drain", process.name, time.monotonic()))
                    await rolling.restart(process)
                    injury.over_s = time.monotonic()
                    await rolling.answered_more(CLIENTS)
                rolling.client.stop()
                async with asyncio.timeout(120):
                    await load
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
            assert rolling.ledger.broken() == [], rolling.trouble()
            cut = [entry for entry in rolling.ledger if entry.outcome is Outcome.CUT and entry.came]
            assert cut == [], rolling.trouble()
            rest = await until_at_rest(connection, NAMES, deployment.frontends, timeout_s=60)
            assert not any(rest.counts.values()), rest
