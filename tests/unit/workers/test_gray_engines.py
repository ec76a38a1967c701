"""Engines that take requests and do not answer: sequences that wait too long, and the canary after idling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from headrace.workers.engine import Output, Pooled, PoolItem
from headrace.workers.errors import RequestInvalid
from headrace.workers.probes import Canary, EngineProbe
from headrace.workers.runtime.runtime import Runtime
from tests.support.runtime_bench import INFO, TABLE, Bench, FakeEngine, FakeSession, generation


@contextlib.asynccontextmanager
async def running(**limits: Any) -> AsyncIterator[Bench]:
    engine, session = FakeEngine(), FakeSession()
    runtime = Runtime(engine, **{"stall_s": 0.2, **limits})  # type: ignore[arg-type]
    runtime.attach(session, INFO, TABLE)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(runtime.run())
        yield Bench(runtime, engine, session)
        task.cancel()


async def keep_alive(bench: Bench, n: int = 60) -> None:
    """Steps that give others something."""
    for _ in range(n):
        bench.step(Output("somebody else", [7]))
        await asyncio.sleep(0.01)
        if bench.session.moved:
            return


@pytest.mark.parametrize(
    ("tokens", "limits", "says"),
    [(0, {"first_token_s": 0.1}, "no first token"), (1, {"token_s": 0.1, "first_token_s": 60.0}, "no next token")],
)
async def test_a_sequence_that_gets_nothing_while_others_do_is_tried_elsewhere(
    tokens: int, limits: dict[str, float], says: str
) -> None:
    async with running(**limits) as bench:
        await bench.start(generation())
        (taken,) = bench.engine.taken
        for _ in range(tokens):
            bench.step(Output(taken.id, [40]))
        await keep_alive(bench)
        (fault,) = bench.session.moved
        assert says in fault.message
        assert fault.retriable
        assert not bench.runtime.dead.done(), "the engine works"


async def test_a_sequence_that_gets_tokens_slowly_is_left_alone() -> None:
    async with running(first_token_s=0.15, token_s=0.15) as bench:
        await bench.start(generation(max_tokens=100))
        (taken,) = bench.engine.taken
        for _ in range(30):
            bench.step(Output(taken.id, [40]))
            await asyncio.sleep(0.02)
        assert bench.session.moved == []


def canary(bench: Bench, *, info: Any = INFO, idle_s: float = 0.05, may: bool = True) -> Canary:
    probe = EngineProbe(bench.engine, bench.runtime, info, token=1)  # type: ignore[arg-type]
    return Canary(probe, bench.runtime, idle_s=idle_s, timeout_s=0.1, serving=lambda: may)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_engine_that_died_in_its_sleep_is_found_out_before_a_client_finds_out() -> None:
    async with running(stall_s=60.0) as bench:
        await canary(bench).run()
        assert "not answered" in bench.runtime.dead.result()


async def test_an_engine_that_answers_is_asked_again_only_after_the_next_idle_time() -> None:
    async with running(stall_s=60.0) as bench:
        task = asyncio.create_task(canary(bench).run())
        for n in (1, 2):
            await until(lambda n=n: len(bench.engine.taken) == n)  # type: ignore[misc]
            bench.step(Output(bench.engine.taken[-1].id, [3], finish="length"))
            assert bench.runtime.watchdog.idle_s < 0.05
        assert not bench.runtime.dead.done()
        task.cancel()


async def test_an_engine_that_works_is_not_asked() -> None:
    async with running(stall_s=60.0) as bench:
        await bench.start(generation())
        task = asyncio.create_task(canary(bench).run())
        await asyncio.sleep(0.2)
        assert len(bench.engine.taken) == 1
        task.cancel()


async def test_nothing_is_asked_while_the_worker_takes_nothing_or_where_it_is_switched_off() -> None:
    async with running(stall_s=60.0) as bench:
        task = asyncio.create_task(canary(bench, may=False).run())
        await canary(bench, idle_s=0).run()
        await asyncio.sleep(0.15)
        assert bench.engine.taken == []
        task.cancel()


async def test_a_refusal_is_an_answer() -> None:
    async with running(stall_s=60.0) as bench:
        bench.engine.refuse = RequestInvalid("not this one")
        task = asyncio.create_task(canary(bench).run())
        await asyncio.sleep(0.2)
        assert not bench.runtime.dead.done()
        task.cancel()


@pytest.mark.parametrize("answers", [True, False])
async def test_an_engine_of_vectors_is_asked_for_one(answers: bool) -> None:
    async with running(stall_s=60.0) as bench:
        asked: list[PoolItem] = []

        async def pool(item: PoolItem) -> Pooled:
            asked.append(item)
            if not answers:
                await asyncio.Future()
            return Pooled(b"")

        bench.engine.pool = pool  # type: ignore[attr-defined]
        task = asyncio.create_task(canary(bench, info=replace(INFO, kinds=("embedding",))).run())
        await until(lambda: asked and (answers or bench.runtime.dead.done()))
        assert bench.runtime.dead.done() is not answers
        task.cancel()
