"""Frontend, worker and NATS server killed while a durable answer is made: the client comes back and misses no token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.broker.durable.stored_job import JobPublisher, NewJob
from headrace.broker.durable.stored_jobs import JobReader
from headrace.tools.chaos.deployment import MODEL
from tests.faults.support.scene import NAMES, Scene, deployed

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

TOKENS = 200
ENGINE = ('timing_overrides={"decode_base_s": 0.05, "prefill_tokens_per_s": 20000}',)
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Which way does the water go?", "max_tokens": TOKENS, "temperature": 0}
LONG_S = 120.0


def url(scene: Scene, frontend: int) -> str:
    address = scene.deployment.frontends[frontend]
    return f"http://{address.host}:{address.port}"


class Client:
    """Reads one durable stream; when its connection ends too early it goes on at the other frontend."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._frontend = 0
        self._refused = ""
        self._reading: asyncio.Task[None] | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.done = asyncio.Event()

    @property
    def frontend(self) -> int:
        return self._frontend

    def start(self) -> asyncio.Task[None]:
        self._reading = asyncio.create_task(self._run())
        return self._reading

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=20) as client, asyncio.timeout(LONG_S):
            while not self.done.is_set():
                try:
                    await self._read(client)
                except httpx.HTTPError:
                    await asyncio.sleep(0.2)
                self._frontend = 1 - self._frontend

    async def _read(self, client: httpx.AsyncClient) -> None:
        headers = {"Headrace-Durable": "1", "Idempotency-Key": "the question"}
        if self.events:
            headers["Last-Event-ID"] = self.events[-1][0]
        where = f"{url(self._scene, self._frontend)}/v1/completions"
        async with client.stream("POST", where, json={**BODY, "stream": True}, headers=headers) as response:
            if response.status_code != 200:
                self._refused = f"{response.status_code} {(await response.aread())[:500]!r}"
                await asyncio.sleep(0.2)
                return
            name = ""
            async for line in response.aiter_lines():
                field, _, value = line.partition(": ")
                if field == "id":
                    name = value
                elif value == "[DONE]":
                    self.done.set()
                elif field == "data" and name:  # an error without a name is that of this connection alone
                    event = json.loads(value)
                    assert "error" not in event, f"the job has failed after {len(self.events)} events: {event}"
                    self.events.append((name, event))
                    name = ""

    async def reaches(self, count: int) -> None:
        reading = self._reading
        assert reading is not None
        try:
            await self._scene.until(f"{count} events", lambda: len(self.events) >= count or reading.done())
        except AssertionError as error:
            error.add_note(f"{len(self.events)} events, the last of {self.events[-1:]}; last refused with: {self._refused}")
            raise
        if reading.done():
            await reading  # raises what has ended it

    def text(self) -> str:
        return "".join(choice["text"] for _, event in self.events for choice in event["choices"])


async def undisturbed(scene: Scene) -> str:
    """The text of an answer that nothing happens to, once the frontend gives one: a busy machine may cost it its lease."""
    await scene.well()
    async with httpx.AsyncClient(timeout=60) as client, asyncio.timeout(LONG_S):
        while (response := await client.post(f"{url(scene, 1)}/v1/completions", json=BODY)).status_code == 503:
            await asyncio.sleep(0.5)
    return str(response.json()["choices"][0]["text"])


async def test_a_stream_outlives_its_frontend_its_worker_and_the_nats_server(tmp_path: Path) -> None:
    async with deployed(tmp_path, workers=2, frontends=2, engine=ENGINE) as scene:
        client = Client(scene)
        reading = client.start()
        await client.reaches(15)
        scene.deployment.kill(scene.deployment.of_kind("frontend")[client.frontend])
        await client.reaches(45)
        for worker in scene.deployment.of_kind("worker"):
            scene.deployment.kill(worker)
        await client.reaches(75)
        scene.deployment.server.kill()
        await asyncio.sleep(1.0)
        await scene.deployment.server.start_async()
        await reading
        names = [name for name, _ in client.events]
        token = names[0].partition(".")[0]
        assert names == [f"{token}.{number}" for number in range(len(names))], "an event is missing or came twice"
        assert client.text() == await undisturbed(scene)


async def test_a_published_job_has_one_result_though_every_frontend_dies(tmp_path: Path) -> None:
    async with deployed(tmp_path, workers=1, frontends=2, engine=ENGINE) as scene:
        subjects, connection = NAMES, scene.connection
        job = NewJob(
            name="one-job",
            tenant="_",
            model_slug=MODEL,
            endpoint="/v1/completions",
            body=msgspec.json.encode(BODY),
            deadline=4e9,
        )
        await JobPublisher(connection, subjects).publish(job)
        waiting = asyncio.create_task(JobReader(connection, subjects).result("_", "one-job"))
        await scene.until("a worker has it", lambda: _held(scene))
        for frontend in scene.deployment.of_kind("frontend"):
            scene.deployment.kill(frontend)
            await asyncio.sleep(1.0)
        result = await asyncio.wait_for(waiting, LONG_S)
        assert result.status == "done"
        assert result.response is not None
        answer = json.loads(bytes(result.response.body))
        assert answer["choices"][0]["text"] == await undisturbed(scene)
        counts = await connection.subject_counts(subjects.stream("RESULT"), subjects.result("_", "one-job"))
        assert sum(counts.values()) == 1


async def _held(scene: Scene) -> bool:
    return await scene.held() > 0
