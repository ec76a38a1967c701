"""A frontend with a simulated model, and the `openai` client of it, for all tests of a module."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.integration.frontend.openai_client.calls import MODEL
from tests.support.local_deployment import Serving, serving, sim


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer, request: pytest.FixtureRequest) -> AsyncIterator[Serving]:
    subjects = Subjects(f"oai{os.getpid()}{request.module.__name__.rpartition('_')[2]}")
    async with serving(nats_server, subjects, sim(MODEL)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(deployment: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as made:
        yield made
