"""A worker's death after the last token of an answer and before anybody has confirmed it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.broker.messages.control import Inspect, Inspection
from headrace.commands.control import ask_all, live_workers
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.client import LedgerClient
from headrace.tools.chaos.deployment import MODEL, ChaosDeployment, DeploymentShape, until_well
from headrace.tools.chaos.ledger import Ledger, Outcome
from headrace.tools.chaos.questions import Question

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

NAMES = Subjects()


class Running:
    """A deployment whose links can be cut, and a client that knows every answer."""

    def __init__(self, deployment: ChaosDeployment, connection: Connection) -> None:
        self.deployment = deployment
        self.connection = connection
        self.client = LedgerClient(Ledger(), iter(()), deployment.frontends, model=MODEL, clock=time.monotonic)

    async def states(self) -> dict[int, dict[str, int]]:
        """Process id of a worker → how many of its runs are in which state."""
        live = await live_workers(self.connection, NAMES)
        found = await ask_all(self.connection, NAMES, [member.worker for member in live], Inspect(), Inspection)
        return {member.pid: one.states for member, one in zip(live, found, strict=True) if one is not None}

    async def until_some(self, state: str) -> int:
        """The process id of the worker that has a run in this state."""
        async with asyncio.timeout(30):
            while True:
                for pid, states in (await self.states()).items():
                    if states.get(state):
                        return pid
                await asyncio.sleep(0.05)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    shape = DeploymentShape(workers=2, routers=1, frontends=1)
    async with ChaosDeployment(tmp_path, shape) as deployment, contextlib.AsyncExitStack() as stack:
        options = ConnectOptions(servers=(deployment.server.url,))
        connection = await stack.enter_async_context(await Connection.connect(options, subjects=NAMES))
        assert await until_well(deployment, connection, NAMES, timeout_s=90)
        yield Running(deployment, connection)


async def test_a_worker_that_dies_after_its_last_token_and_before_the_ack_costs_nothing(running: Running) -> None:
    """Its judge is cut off from the broker, so that nobody confirms the end before the worker is killed."""
    deployment = running.deployment
    (frontend,) = deployment.of_kind("frontend")
    question = Question(number=1, prompt=tuple(range(300, 340)), max_tokens=60, stream=True)
    asked = asyncio.create_task(running.client.ask(question))
    await running.until_some("running")
    deployment.cut(frontend)
    pid = await running.until_some("ended")
    os.kill(pid, signal.SIGKILL)
    deployment.mend(frontend)
    entry = await asked
    assert (entry.outcome, entry.detail) == (Outcome.ANSWERED, "")
