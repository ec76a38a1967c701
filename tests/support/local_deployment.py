"""A whole deployment in one process: the frontend, and workers with simulated engines, on a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import httpx

import headrace.frontend.server
import headrace.frontend.serving
import headrace.workers.main
from headrace.broker.messages.members import HELPERS
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.client import ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.settings import WorkerSettings

START_S = 30.0


def sim(name: str, **settings: Any) -> WorkerSettings:
    """A simulated model."""
    args = {"block_size": 8, **settings.pop("args", {})}
    defaults: dict[str, Any] = {"tool_parser": "none", "reasoning_parser": "none", "drain_grace_s": 0.0}
    return WorkerSettings(engine="sim", model=name, served_name=name, engine_args=args, **(defaults | settings))


class Serving:
    """Running. `url` is the frontend's; workers come and go."""

    def __init__(self, server: EmbeddedServer, subjects: Subjects, url: str) -> None:
        self.url = url
        self._options = ConnectOptions(servers=(server.url,), name="worker")
        self._subjects = subjects
        self._workers: dict[asyncio.Task[None], WorkerSettings] = {}

    async def start(self, settings: WorkerSettings) -> asyncio.Task[None]:
        """A worker; returns once requests can reach it."""
        task = asyncio.create_task(headrace.workers.main.run_worker(settings, self._options, self._subjects))
        self._workers[task] = settings
        alike = [s for one, s in self._workers.items() if s.served_name == settings.served_name and not one.done()]
        serving = max(1, sum(s.role not in HELPERS for s in alike))  # those that help others are not counted
        await self._until(lambda health: self._workers_of(health, settings) >= serving, task)
        return task

    async def stop(self, task: asyncio.Task[None], settings: WorkerSettings) -> None:
        """Returns once nobody takes it for ready any more."""
        task.cancel()
        await asyncio.wait([task])
        await self._until(lambda health: self._workers_of(health, settings) == 0)

    async def close(self) -> None:
        for task in self._workers:
            task.cancel()
        if self._workers:
            await asyncio.wait(self._workers)

    def _workers_of(self, health: Any, settings: WorkerSettings) -> int:
        count: int = health["models"].get(settings.served_name, {"workers": 0})["workers"]
        return count

    async def _until(self, met: Any, task: asyncio.Task[None] | None = None) -> None:
        async with asyncio.timeout(START_S), httpx.AsyncClient(base_url=self.url, timeout=START_S) as client:
            while not met((await client.get("/health")).json()):
                if task is not None and task.done():
                    task.result()
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serving(
    server: EmbeddedServer, subjects: Subjects, *models: WorkerSettings, **settings: Any
) -> AsyncIterator[Serving]:
    """One worker for each of `models`; `settings` are the frontend's."""
    wishes = FrontendSettings(port=0, drain_grace_s=0, access_log=False, **settings)
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    options = ConnectOptions(servers=(server.url,), name="frontend")
    stops: list[asyncio.Event] = []

    @contextlib.contextmanager
    def no_signals(server: object, stop: asyncio.Event, *others: object) -> Iterator[None]:
        stops.append(stop)  # signals of this process go to the workers, which came later
        yield

    # one process of many tests: what a process of its own does for itself would outlive them
    with (
        mock.patch.object(headrace.frontend.server, "quiet_gc"),
        mock.patch.object(headrace.workers.main, "_quiet_gc"),
        mock.patch.object(headrace.frontend.serving, "_signals", no_signals),
    ):
        task = asyncio.create_task(
            headrace.frontend.server.run_frontend(wishes, options, subjects, on_listening=started.set_result), name="frontend"
        )
        running: Serving | None = None
        try:
            await asyncio.wait({task, started}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            running = Serving(server, subjects, started.result())
            await _cards_read(running.url, *wishes.api_key[:1])
            for model in models:
                await running.start(model)
            yield running
        finally:
            if running is not None:
                await running.close()
            for stop in stops:
                stop.set()
            await asyncio.wait([task], timeout=START_S)
            task.cancel()


async def _cards_read(url: str, key: str = "") -> None:
    """Wait until a frontend knows which models there are: before that it says 503 of each that it has not read."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with asyncio.timeout(START_S), httpx.AsyncClient(headers=headers) as client:
        while (await client.get(f"{url}/v1/models/no-such-model")).status_code == 503:
            await asyncio.sleep(0.01)
