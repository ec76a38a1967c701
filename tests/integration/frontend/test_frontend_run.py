"""`run_frontend` against a real nats-server: it waits for the server, shows what is there, and stops on a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from headrace.broker.models.cards import ModelCard
from headrace.broker.models.directory import publish_card
from headrace.frontend.server import run_frontend
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import ServerUnreachable
from headrace.jetstream.subjects import Subjects, pool_id
from tests.support.frontend.fakes import FILES


@asynccontextmanager
async def running(url: str, subjects: Subjects, **settings: float | str) -> AsyncIterator[httpx.AsyncClient]:
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    options = ConnectOptions(servers=(url,))
    wishes = FrontendSettings(port=0, drain_grace_s=1, **settings)  # type: ignore[arg-type]
    task = asyncio.create_task(run_frontend(wishes, options, subjects, on_listening=started.set_result))
    try:
        await asyncio.wait({task, started}, timeout=15, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        async with httpx.AsyncClient(base_url=started.result()) as client:
            yield client
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(task, 10)


async def publish(connection: Connection, subjects: Subjects, model: str, namespace: str) -> None:
    card = ModelCard(
        model=model, pool=pool_id(model, namespace), namespace=namespace, context_length=64, block_size=16, vocab_size=257
    )
    await publish_card(connection, subjects, card, FILES)


async def test_a_model_without_workers_is_known_but_not_ready(
    nats_server: EmbeddedServer, connection: Connection, subjects: Subjects
) -> None:
    await publish(connection, subjects, "mine", "default")
    await publish(connection, subjects, "theirs", "other")
    async with running(nats_server.url, subjects, no_worker_wait_s=0.2) as client:
        async with asyncio.timeout(10):
            while not (health := (await client.get("/health")).json())["models"] or not health["broker"]["ready"]:
                await asyncio.sleep(0.02)
        assert list(health["models"]) == ["mine"]  # not the other namespace's
        assert (await client.get("/v1/models")).json()["data"] == []  # what nobody serves is not offered
        assert (await client.get("/v1/models/mine")).status_code == 200
        assert (await client.get("/live")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "no model has a ready worker")
        answer = await client.post("/v1/completions", json={"model": "mine", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        assert "retry-after" in answer.headers
        answer = await client.post("/v1/completions", json={"model": "theirs", "prompt": "x"})
        assert answer.status_code == 404
        assert "served: none" in answer.json()["error"]["message"]  # a model that had no worker lately is not on offer


@pytest.mark.slow
async def test_it_waits_for_a_server_that_comes_later(tmp_path: Path, subjects: Subjects) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = EmbeddedServer(tmp_path / "nats", port=port)

    async def later() -> None:
        await asyncio.sleep(0.3)
        await server.start_async()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(later())
            async with running(server.url, subjects) as client:
                assert (await client.get("/live")).status_code == 200
    finally:
        await server.stop_async()


async def test_it_gives_up_on_a_server_that_never_comes(subjects: Subjects) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ServerUnreachable):
        async with running(url, subjects, start_timeout_s=0.1):
            pass
