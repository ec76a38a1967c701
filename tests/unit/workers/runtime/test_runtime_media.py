"""Requests with media in the runtime: nobody waits while they are read, and the engine says how many tokens they take."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from headrace.workers.engine import Output, Sequence
from headrace.workers.errors import EngineDead, RequestInvalid
from headrace.workers.runtime.runtime import Runtime
from tests.support.runtime_bench import INFO, TABLE, Bench, FakeEngine, FakeSession, generation, ids_of, running

IMAGE = [{"kind": "image", "digest": 1, "start": 0, "length": 1, "data": b"x"}]


class Reading(FakeEngine):
    """Takes its time over media, until it is told what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def submit(self, sequence: Sequence) -> None:
        if sequence.media:
            await self.read
        await super().submit(sequence)


@contextlib.asynccontextmanager
async def reading() -> contextlib.AbstractAsyncContextManager[Bench]:  # type: ignore[misc]
    engine, session = Reading(), FakeSession()
    runtime = Runtime(engine, stall_s=60.0)  # type: ignore[arg-type]
    runtime.attach(session, INFO, TABLE)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(runtime.run())
        yield Bench(runtime, engine, session)
        task.cancel()


async def test_others_do_not_wait_while_an_image_is_read() -> None:
    async with reading() as bench:
        await bench.start(generation(media=IMAGE))
        await bench.start(generation())
        assert [bool(sequence.media) for sequence in bench.engine.taken] == [False]
        bench.engine.read.set_result(None)
        await bench.settle()
        assert [bool(sequence.media) for sequence in bench.engine.taken] == [False, True]


async def test_an_image_that_cannot_be_read_fails_its_request_only() -> None:
    async with reading() as bench:
        await bench.start(generation(media=IMAGE))
        bench.engine.read.set_exception(RequestInvalid("messages[0]: cannot be read", param="messages[0]"))
        await bench.settle()
        (fault,) = bench.session.failed
        assert (fault.code, fault.param) == ("invalid_request", "messages[0]")
        await bench.start(generation())
        assert len(bench.engine.taken) == 1


async def test_an_engine_that_dies_while_it_reads_is_dead() -> None:
    async with reading() as bench:
        await bench.start(generation(media=IMAGE))
        bench.engine.read.set_exception(EngineDead("gone"))
        await bench.settle()
        assert await asyncio.wait_for(asyncio.shield(bench.runtime.dead), 5) == "gone"


async def test_a_request_that_is_taken_back_while_its_image_is_read_is_aborted() -> None:
    async with reading() as bench:
        run = await bench.start(generation(media=IMAGE))
        bench.runtime.stop(run)
        await bench.settle()
        assert len(bench.engine.aborted) == 1, "it does not wait for the image"
        bench.engine.read.set_result(None)


@pytest.mark.parametrize("told", [None, 40])
async def test_the_prompt_has_as_many_tokens_as_the_engine_says(told: int | None) -> None:
    async with running() as bench:
        await bench.start(generation(media=IMAGE))
        (sequence,) = bench.engine.taken
        (word,) = ids_of(" hello")
        bench.step(Output(sequence.id, [word], cached_tokens=30, prompt_tokens=told))
        bench.step(Output(sequence.id, [word], finish="length"))
        fin = bench.session.fins[0]
        assert (fin.prompt_tokens, fin.cached_tokens) == ((3, 3) if told is None else (40, 30))
        assert bench.session.computed == [0 if told is None else 10]
