"""Parsers in a whole worker (simulator, real server): how it chooses them, tells of them, and uses them when a job moves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.broker.codec import decode, encode, pack_u32
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.jobs import Job, OutputParts, new_id, parts_of
from headrace.broker.messages.control import Drain, Inspect, Inspection
from headrace.broker.messages.frames import Finish, Text
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import Generation, Parsing, Sampling
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects, pool_id
from headrace.workers import main as workers_main
from headrace.workers import metrics
from headrace.workers.errors import EngineStartFailed
from headrace.workers.settings import WorkerSettings
from tests.support.parsing_pieces import WEATHER, said

POOL = pool_id("m")
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'
ANSWER = "<think>" + "I think. " * 20 + "</think>" + "It is fine. " * 20 + CALL


@contextlib.asynccontextmanager
async def working(
    connection: Connection, subjects: Subjects, url: str, monkeypatch: pytest.MonkeyPatch, *names: str, **options: Any
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Workers of these names, ready; those that are still there at the end are stopped."""
    monkeypatch.setattr(workers_main, "_quiet_gc", lambda: None)
    monkeypatch.setattr(workers_main, "_signals", lambda *_: contextlib.nullcontext())
    options = {"tool_parser": "hermes", "reasoning_parser": "think"} | options
    tasks = []
    for name in names:
        settings = WorkerSettings(
            engine="sim",
            model="m",
            served_name="m",
            worker_name=name,
            engine_args={"blocks": 200, "context_length": 2048, "timing": "cpu-small", "speedup": 4.0},
            drain_grace_s=0.0,
            **options,
        )
        connect = ConnectOptions(servers=(url,), name=name)
        tasks.append(asyncio.create_task(workers_main.run_worker(settings, connect, subjects)))
    members = connection.bucket(subjects.bucket("members"))
    try:
        async with asyncio.timeout(30):
            while not any(task.done() for task in tasks) and len(await members.entries("worker.>")) < len(tasks):
                await asyncio.sleep(0.02)
        for task in tasks:
            if task.done():
                task.result()
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def busy(connection: Connection, subjects: Subjects) -> str:
    """The worker that has a run."""
    for entry in await connection.bucket(subjects.bucket("members")).entries("worker.>"):
        name = decode(WorkerMember, entry.value).worker
        if decode(Inspection, await connection.request(subjects.control(name), encode(Inspect()), timeout_s=2.0)).runs:
            return name
    raise AssertionError("nobody has a run")


async def answered(served: Ingress, connection: Connection, subjects: Subjects, *, move: bool) -> tuple[OutputParts, Finish]:
    """The answer of a job, which is moved to another worker half way if asked for."""
    async with asyncio.timeout(20):
        while not served.models.ready_names():
            await asyncio.sleep(0.01)
    generation = Generation(
        token_ids=pack_u32([7, 8, 9]),
        sampling=Sampling(max_tokens=400),
        parse=Parsing(tools=[WEATHER]),
        extra={"sim_answer": ANSWER},
    )
    card = served.models.get("m").card
    stream = await served.submit(Job(id=new_id(), card=card, generation=generation, prompt_tokens=3, max_tokens=400))
    texts: list[Text] = []
    fin: Finish | None = None
    async with asyncio.timeout(40):
        while not stream.finished:
            for row in await stream.rows():
                texts += row.texts
                fin = row.fin or fin
            if move and len(texts) > 60:
                move = False
                name = await busy(connection, subjects)
                pool = served.models.get("m").card.pool
                await connection.request(subjects.operate_worker(pool, name), encode(Drain(grace_s=0.0)), timeout_s=5.0)
    assert fin is not None
    return said(parts_of([*texts, fin.tail])), fin


@contextlib.asynccontextmanager
async def ingress(connection: Connection, subjects: Subjects) -> AsyncIterator[Ingress]:
    served = Ingress(connection, subjects)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(served.run())
        await served.wait_started(10)
        yield served
        running.cancel()


async def test_card_and_member_name_the_parsers(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(connection, subjects, nats_server.url, monkeypatch, "w1"):
        entry = await connection.bucket(subjects.bucket("models")).get(POOL)
        assert entry is not None
        card = decode(ModelCard, entry.value)
        (member,) = await connection.bucket(subjects.bucket("members")).entries("worker.>")
        worker = decode(WorkerMember, member.value)
    assert (card.tool_parser, card.reasoning_parser) == ("hermes", "think")
    assert (worker.tool_parser, worker.reasoning_parser) == ("hermes", "think")


async def test_a_wrong_name_stops_the_worker_before_its_engine_starts(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(workers_main, "_start", never)
    with pytest.raises(EngineStartFailed, match=r"no tool parser 'hermse'; close to it: hermes; known: auto, none, hermes"):
        async with working(connection, subjects, nats_server.url, monkeypatch, "w1", tool_parser="hermse"):
            pass


@pytest.mark.slow
async def test_an_answer_that_moves_half_way_is_taken_apart_as_if_it_had_not(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = metrics.RESUMED._value.get()
    async with working(connection, subjects, nats_server.url, monkeypatch, "w1", "w2"), ingress(connection, subjects) as served:
        whole, end = await answered(served, connection, subjects, move=True)
    assert metrics.RESUMED._value.get() == resumed + 1
    assert whole.reasoning == "I think. " * 20
    assert whole.content == "It is fine. " * 20
    assert [(call.name, call.arguments) for call in whole.calls] == [("get_weather", '{"city": "Bonn"}')]
    assert end.reason == "tool_calls"
    assert 0 < end.reasoning_tokens < end.completion_tokens
