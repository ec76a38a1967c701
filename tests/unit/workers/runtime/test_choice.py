"""A long answer that goes on here: what it has said is replayed in slices, while everything else on the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headrace.broker.messages.requests import Generation, Sampling
from headrace.workers.engine import Output
from headrace.workers.runtime import choice
from tests.support.runtime_bench import INFO, ids_of
from tests.unit.workers.runtime.test_parsed import asking, running

SAID = ids_of("<think>" + "thinking, " * 400 + "</think>Well: ")
INLINE = 16
REST = [*ids_of('<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'), 2]


@pytest.fixture(autouse=True)
def slow_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes a millisecond, so that slices are short."""
    now = iter(range(10**9))

    async def in_slices(choices: Any) -> None:
        await replay_in_slices(choices, clock=lambda: next(now) / 1000)

    replay_in_slices = choice.replay_in_slices
    monkeypatch.setattr("headrace.workers.runtime.runs.replay_in_slices", in_slices)
    monkeypatch.setattr("headrace.workers.runtime.runs.INLINE_TOKENS", INLINE)
    monkeypatch.setattr("tests.unit.workers.runtime.test_parsed.INFO", replace(INFO, context_length=100_000))


async def until(met: Callable[[], bool]) -> int:
    """How many turns the event loop had."""
    turns = 0
    async with asyncio.timeout(10):
        while not met():
            turns += 1
            await asyncio.sleep(0)
    return turns


def roomy() -> Generation:
    return msgspec.structs.replace(asking(), sampling=Sampling(max_tokens=100_000))


async def test_others_have_their_turn_while_a_long_answer_is_replayed() -> None:
    async with running() as bench:
        await bench.settle()
        await bench.start(roomy(), emitted=[SAID])
        assert not bench.engine.taken, "the engine has nothing of it yet"
        assert await until(lambda: bool(bench.engine.taken)) > len(SAID) // 10
        bench.step(Output(bench.engine.taken[0].id, REST, finish="stop"))
        said = bench.session.said()
        assert (said.reasoning, said.content) == ("", ""), "what was said is not said again"
        assert [(call.name, call.arguments) for call in said.calls] == [("get_weather", '{"city": "Bonn"}')]


async def test_a_short_one_goes_to_the_engine_at_once() -> None:
    async with running() as bench:
        await bench.settle()
        await bench.start(roomy(), emitted=[SAID[:INLINE]])
        assert bench.engine.taken


async def test_one_that_is_stopped_meanwhile_never_reaches_the_engine() -> None:
    async with running() as bench:
        await bench.settle()
        run = await bench.start(roomy(), emitted=[SAID])
        bench.runtime.stop(run)
        for _ in range(len(SAID)):
            await asyncio.sleep(0)
        assert not bench.engine.taken


async def test_one_that_is_parked_meanwhile_waits_until_it_may_go_on() -> None:
    async with running() as bench:
        await bench.settle()
        run = await bench.start(roomy(), emitted=[SAID])
        bench.runtime.park(run)
        for _ in range(len(SAID)):
            await asyncio.sleep(0)
        assert not bench.engine.taken
        bench.runtime.unpark(run)
        await bench.settle()
        assert len(bench.engine.taken) == 1
        bench.step(Output(bench.engine.taken[0].id, REST, finish="stop"))
        assert len(bench.session.said().calls) == 1


async def test_a_parser_that_fails_on_the_way_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, text: str) -> None:
        raise ValueError("what is this?")

    async with running() as bench:
        await bench.settle()
        monkeypatch.setattr("headrace.workers.parsing.stages.Think.push", fail)
        await bench.start(roomy(), emitted=[SAID])
        await until(lambda: bool(bench.session.failed))
        assert bench.session.failed[0].code == "engine_error"
        assert not bench.engine.taken
