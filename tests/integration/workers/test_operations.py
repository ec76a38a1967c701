"""Workers that are put to sleep, woken, paused and asked for their health, by command, while clients use them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import pytest_asyncio

import headrace.router.main
from headrace.broker.codec import decode
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.operator import Operated
from headrace.cli import main
from headrace.commands.control import live_workers
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.router.main import builder, run_router
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.settings import RouterOptions, SessionOptions
from headrace.workers.sim.tokens import expected_text
from tests.support.local_deployment import Serving, serving, sim

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
SLOW = {"decode_base_s": 0.02}

pytestmark = pytest.mark.asyncio(loop_scope="module")

Command = Callable[..., Awaitable[int]]


@pytest.fixture(scope="module")
def names() -> Subjects:
    return Subjects(f"oper{os.getpid()}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer, names: Subjects) -> AsyncIterator[Serving]:
    async with serving(nats_server, names, no_worker_wait_s=1.0) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(deployment: Serving) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=deployment.url, timeout=60) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connection(nats_server: EmbeddedServer, names: Subjects) -> AsyncIterator[Connection]:
    options = ConnectOptions(servers=(nats_server.url,), name="test")
    async with await Connection.connect(options, subjects=names) as made:
        yield made


@pytest.fixture
def command(nats_server: EmbeddedServer, names: Subjects) -> Command:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, ["worker", *words, "--nats", nats_server.url, "--prefix", names.prefix])

    return run


@contextlib.asynccontextmanager
async def worker(deployment: Serving, name: str, model: str = "", **settings: Any) -> AsyncIterator[str]:
    """A worker of a model of its own, unless another one is named; yields the model."""
    model = model or f"acme/{name}"
    args = {"timing_overrides": SLOW, "slots": 4, **settings.pop("args", {})}
    made = sim(model, worker_name=name, args=args, **settings)
    task = await deployment.start(made)
    try:
        yield model
    finally:
        task.cancel()
        await asyncio.wait([task])


async def say(api: httpx.AsyncClient, model: str, max_tokens: int = 4) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    return await api.post("/v1/completions", json=body)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["text"]
    return said


async def until(met: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await met():
            await asyncio.sleep(0.02)


async def member(connection: Connection, names: Subjects, name: str) -> WorkerMember:
    (found,) = [one for one in await live_workers(connection, names) if one.worker.startswith(f"{name}-")]
    return found


async def running(api: httpx.AsyncClient, connection: Connection, names: Subjects, name: str, runs: int = 1) -> None:
    """Wait until a worker runs so many requests."""
    from headrace.broker.codec import encode
    from headrace.broker.messages.control import Inspect, Inspection

    async def busy() -> bool:
        subject = names.control((await member(connection, names, name)).worker)
        found = decode(Inspection, await connection.request(subject, encode(Inspect()), timeout_s=5))
        return found.states.get("running", 0) >= runs

    await until(busy)


async def test_a_worker_sleeps_after_its_work_and_serves_again_when_woken(
    deployment: Serving,
    api: httpx.AsyncClient,
    connection: Connection,
    names: Subjects,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with worker(deployment, "sleepy") as model:
        answering = asyncio.create_task(say(api, model, 40))
        await running(api, connection, names, "sleepy")
        assert await command("sleep", "sleepy", "--grace", "20") == 0
        assert answering.done(), "what ran was finished first"
        assert text(answering.result()) == expected_text(PROMPT, 40)
        told = capsys.readouterr().out
        assert "sleeps" in told
        assert "host_bytes_freed" in told
        asleep = await member(connection, names, "sleepy")
        assert (asleep.draining, asleep.sleeping) == (True, 1)
        assert await command("status") == 0
        assert "asleep (1)" in capsys.readouterr().out
        assert (await say(api, model)).status_code == 503
        assert await command("sleep", "sleepy") == 0, "it does already"
        assert await command("pause", "sleepy") == 1
        assert "sleeps: wake it first" in capsys.readouterr().err
        late = asyncio.create_task(say(api, model))
        await asyncio.sleep(0.1)
        assert await command("wake", "sleepy") == 0
        assert "warm_s" in capsys.readouterr().out
        assert text(await late) == expected_text(PROMPT, 4), "a request that waited is served"
        awake = await member(connection, names, "sleepy")
        assert (awake.draining, awake.sleeping, awake.waking) == (False, 0, False)
        assert await command("wake", "sleepy") == 0, "it is already"


async def test_what_a_worker_cannot_finish_before_its_sleep_goes_on_elsewhere(
    deployment: Serving, api: httpx.AsyncClient, connection: Connection, names: Subjects, command: Command
) -> None:
    async with worker(deployment, "first", model="acme/two"):
        answering = asyncio.create_task(say(api, "acme/two", 400))
        await running(api, connection, names, "first")
        async with worker(deployment, "second", model="acme/two"):
            assert await command("sleep", "first", "--grace", "0", "--level", "2") == 0
            assert not answering.done()
            assert text(await answering) == expected_text(PROMPT, 400)


async def test_a_paused_worker_stands_still_and_goes_on_where_it_was(
    deployment: Serving,
    api: httpx.AsyncClient,
    connection: Connection,
    names: Subjects,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # a step every 20 ms: an engine that reports nothing for 0.5 s is dead, unless it was paused
    async with worker(deployment, "still", stall_s=0.5, token_s=0.5) as model:
        answering = asyncio.create_task(say(api, model, 200))  # four seconds: a command takes one on a busy machine
        await running(api, connection, names, "still")
        assert await command("pause", "still") == 0
        assert "held  1" in capsys.readouterr().out
        await asyncio.sleep(1.0)
        assert not answering.done()
        assert (await member(connection, names, "still")).paused
        capsys.readouterr()
        assert await command("health", "still", "--json") == 0
        health = json.loads(capsys.readouterr().out)
        assert (health["healthy"], health["state"], "canary_s" in health) == (True, "pause", False)
        assert await command("role", "still", "prefill") == 1
        assert await command("resume", "still") == 0
        assert text(await answering) == expected_text(PROMPT, 200)
        assert text(await say(api, model)) == expected_text(PROMPT, 4)
        assert await command("resume", "still") == 0, "nothing to do"


async def test_a_pause_with_a_grace_period_finishes_first(
    deployment: Serving, api: httpx.AsyncClient, connection: Connection, names: Subjects, command: Command
) -> None:
    async with worker(deployment, "polite") as model:
        answering = asyncio.create_task(say(api, model, 30))
        await running(api, connection, names, "polite")
        assert await command("pause", "polite", "--grace", "20") == 0
        assert text(await answering) == expected_text(PROMPT, 30)
        assert await command("resume", "polite") == 0


async def test_a_reset_cache_forgets_the_prefix(deployment: Serving, api: httpx.AsyncClient, command: Command) -> None:
    async with worker(deployment, "forgetful") as model:

        async def cached() -> int:
            usage = (await say(api, model)).json()["usage"]
            return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

        await cached()
        assert await cached() == 16
        assert await command("reset-cache", "forgetful") == 0
        assert await cached() == 0


async def test_health_asks_the_engine_for_a_token(
    deployment: Serving, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    async with worker(deployment, "healthy"):
        assert await command("health", "healthy", "--json") == 0
        told = capsys.readouterr().out  # behind the log of the start, which may go on until now
        health = json.loads(told[told.index("{\n") :])
        assert health["alive"]
        assert health["canary_s"] > 0
        assert health["state"] == "serving"
        assert health["last_report_s"] < 5
        assert await command("health", "healthy", "--no-canary") == 0
        assert "canary_s" not in capsys.readouterr().out
        assert await command("health", "healthy", "--timeout", "0") == 1


async def test_a_profile_is_taken_where_there_is_a_folder_for_it_and_refused_elsewhere(
    deployment: Serving,
    api: httpx.AsyncClient,
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with worker(deployment, "profiled", args={"profile_dir": str(tmp_path)}) as model:
        assert await command("profile", "start", "profiled") == 0
        await say(api, model, 5)
        assert await command("profile", "start", "profiled") == 1
        assert await command("profile", "stop", "profiled") == 0
        (written,) = tmp_path.iterdir()
        steps = json.loads(written.read_text())["traceEvents"]
        assert len(steps) >= 5
        assert all(step["dur"] > 0 for step in steps)
    capsys.readouterr()
    async with worker(deployment, "plain"):
        assert await command("profile", "start", "plain") == 1
        assert "it can when started with `profile_dir`" in capsys.readouterr().err


async def test_a_command_that_cannot_be_read_is_answered(deployment: Serving, connection: Connection, names: Subjects) -> None:
    async with worker(deployment, "strict"):
        found = await member(connection, names, "strict")
        subject = names.operate_worker(found.pool, found.worker)
        answer = decode(Operated, await connection.request(subject, b"\x81\xa2op\xa3fly", timeout_s=5))
        assert not answer.ok
        assert "fly" in answer.message


@contextlib.asynccontextmanager
async def router(nats_server: EmbeddedServer, names: Subjects, *, wakes: bool) -> AsyncIterator[None]:
    options = RouterOptions(name="r", session=SessionOptions(wake_on_demand=wakes, index_wait_s=0.1))
    connect = ConnectOptions(servers=(nats_server.url,), name="router")
    with mock.patch.object(headrace.router.main, "_quiet_gc"):  # this process has other things to do
        task = asyncio.create_task(run_router(options, connect, names, builder(options, SchedulerSettings())))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_router_wakes_a_sleeping_worker_for_a_request_when_asked_to(
    nats_server: EmbeddedServer,
    deployment: Serving,
    api: httpx.AsyncClient,
    connection: Connection,
    names: Subjects,
    command: Command,
) -> None:
    async with (
        worker(deployment, "ondemand") as model,
        worker(deployment, "other", model="acme/ondemand"),
        router(nats_server, names, wakes=True),
    ):
        for name in ("ondemand", "other"):
            assert await command("sleep", name, "--grace", "0") == 0

        async def offered() -> bool:
            return model in [one["id"] for one in (await api.get("/v1/models")).json()["data"]]

        await until(offered)
        assert text(await say(api, model)) == expected_text(PROMPT, 4)
        levels = sorted([(await member(connection, names, name)).sleeping for name in ("ondemand", "other")])
        assert levels == [0, 1], "one is enough"


async def test_a_router_leaves_sleeping_workers_alone_by_default(
    nats_server: EmbeddedServer,
    deployment: Serving,
    api: httpx.AsyncClient,
    connection: Connection,
    names: Subjects,
    command: Command,
) -> None:
    async with worker(deployment, "tired") as model, router(nats_server, names, wakes=False):
        assert await command("sleep", "tired", "--grace", "0") == 0
        assert (await say(api, model)).status_code == 503
        assert (await member(connection, names, "tired")).sleeping == 1
