"""Jobs are listed and shown behind 10,000 jobs and results of others: the server picks a tenant's own, a page at a time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterable

import msgspec
import pytest

from headrace.broker.messages.durable import JobResult
from headrace.cli import main
from headrace.client.client import LATEST, PAGE, Client, ClientOptions, find_open
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects

OTHERS = 10_000
OWN = 2 * PAGE + 100
BODY = b'{"model": "m", "messages": []}'
LIMIT_S = 100.0  # for all of it; on a machine with nothing else to do it takes a few seconds


async def all_of(calls: Iterable[Coroutine[None, None, None]]) -> None:
    """Make these calls, 64 at a time."""
    waiting = iter(calls)

    async def some() -> None:
        for call in waiting:
            await call

    async with asyncio.TaskGroup() as tasks:
        for _ in range(64):
            tasks.create_task(some())


class Queues:
    """What is stored of all tenants."""

    def __init__(self, connection: Connection, subjects: Subjects) -> None:
        self._connection = connection
        self._subjects = subjects

    async def job(self, tenant: str, name: str) -> None:
        await self._connection.publish(self._subjects.job("m", tenant), BODY, headers={"Hr-Job": name}, timeout_s=LIMIT_S)

    async def result(self, tenant: str, name: str) -> None:
        data = msgspec.json.encode(JobResult(id=name, status="done", finished=time.time()))
        await self._connection.publish(self._subjects.result(tenant, name), data, timeout_s=LIMIT_S)

    async def fill(self) -> None:
        await self.result("acme", "ended")
        await all_of(self.job("other", f"theirs-{n}") for n in range(OTHERS))
        await all_of(self.job("acme", f"own-{n}") for n in range(OWN))
        await all_of(self.job(tenant, "last") for tenant in ("other", "acme"))
        await all_of(self.result("other", f"their-result-{n}") for n in range(LATEST + PAGE))


async def test_jobs_are_listed_and_shown_behind_ten_thousand_of_another_tenant(
    nats_server: EmbeddedServer, connection: Connection, subjects: Subjects, capsys: pytest.CaptureFixture[str]
) -> None:
    async def command(*words: str) -> int:
        where = ("--tenant", "acme", "--nats", nats_server.url, "--prefix", subjects.prefix)
        return await asyncio.to_thread(main, ["jobs", *words, *where])

    client = Client(connection, subjects, ClientOptions(tenant="acme", prefix=subjects.prefix))
    async with asyncio.timeout(LIMIT_S):
        await Queues(connection, subjects).fill()

        listed = await client.jobs(limit=OWN + 10)
        assert {job.id for job in listed} == {"ended", "last", *(f"own-{n}" for n in range(OWN))}
        assert [job.id for job in listed if job.status] == ["ended"]
        assert len(await client.jobs(limit=10)) == 11, "of those that wait as many as asked for, and the one that has ended"

        assert await command("ls", "--limit", str(OWN + 10), "--json") == 0
        assert {job["id"] for job in json.loads(capsys.readouterr().out)} == {job.id for job in listed}
        assert await command("show", "last") == 1
        assert "'last' has not ended" in capsys.readouterr().err
        assert await command("show", "ended") == 0
        assert json.loads(capsys.readouterr().out)["status"] == "done"
        for unknown in ("theirs-1", "their-result-1"):
            assert await command("show", unknown) == 1
            assert f"there is no job '{unknown}' of this tenant" in capsys.readouterr().err
            assert await find_open(connection, subjects, "acme", unknown) is None
