"""Answers that are taken apart, through the runtime: engine steps in, rows of parts out, also across a resume."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from headrace.broker.codec import pack_u32
from headrace.broker.jobs import OutputParts, parts_of
from headrace.broker.messages.frames import Finish, Part, Text
from headrace.broker.messages.requests import Generation, Parsing, Sampling
from headrace.broker.protocol.run import Run
from headrace.workers import metrics
from headrace.workers.engine import Output
from headrace.workers.parsing.builtin import BuiltinParsers
from headrace.workers.parsing.interface import ParseRequirements
from headrace.workers.runtime.runtime import Runtime
from tests.support.parsing_pieces import WEATHER, said
from tests.support.runtime_bench import INFO, TABLE, Bench, FakeEngine, FakeSession, ids_of

ANSWER = (
    '<think>Grüße, 🌊</think>Well: <tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
)
EOS = 2
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class PartsSession(FakeSession):
    """Keeps the texts of every choice as they came."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, list[Text]] = {}

    def append(self, run: Run, choice: int, ids: list[int], texts: list[Any], logprobs: Any = None, fin: Any = None) -> None:
        run.append(choice, ids, texts, logprobs, fin)
        assert len(ids) == len(texts)
        self.texts.setdefault(choice, []).extend(texts)
        self.ids.setdefault(choice, []).extend(ids)
        if fin:
            self.fins[choice] = fin

    def said(self, choice: int = 0) -> OutputParts:
        fin = self.fins.get(choice)
        return said(parts_of([*self.texts.get(choice, []), fin.tail if fin else ""]))


class ParsedBench(Bench):
    session: PartsSession


@contextlib.asynccontextmanager
async def running(parsers: Any = None) -> AsyncIterator[ParsedBench]:
    engine, session = FakeEngine(), PartsSession()
    runtime = Runtime(engine, stall_s=60.0)  # type: ignore[arg-type]
    parsers = parsers or BuiltinParsers(TABLE, tool="hermes", reasoning="think")
    runtime.attach(session, INFO, TABLE, parsers=parsers)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        feeding = tasks.create_task(runtime.run())
        await asyncio.sleep(0)  # The runtime has to run before its first run starts.
        yield ParsedBench(runtime, engine, session)
        feeding.cancel()


def asking(parsing: Parsing | None = None, **options: Any) -> Generation:
    parsing = parsing or Parsing(tools=[WEATHER])
    return Generation(token_ids=pack_u32([1, 2, 3]), parse=parsing, sampling=Sampling(max_tokens=90), **options)


async def answered(ids: Sequence[int], *, emitted: int = 0, step: int = 1, parsing: Parsing | None = None) -> PartsSession:
    """What a worker says that gets these ids from its engine, `step` at a time, the first `emitted` from another worker."""
    async with running() as bench:
        await bench.start(asking(parsing), emitted=[list(ids[:emitted])] if emitted else None)
        while not bench.engine.taken:  # Many emitted tokens are replayed in slices.
            await asyncio.sleep(0)
        sequence = bench.engine.taken[0].id
        for start in range(emitted, len(ids), step):
            some = list(ids[start : start + step])
            bench.step(Output(sequence, some, finish="stop" if start + step >= len(ids) else None))
        return bench.session


def finished(session: PartsSession) -> Finish:
    return session.fins[0]


IDS = [*ids_of(ANSWER), EOS]


async def test_an_answer_is_taken_apart() -> None:
    session = await answered(IDS)
    whole = session.said()
    assert (whole.reasoning, whole.content) == ("Grüße, 🌊", "Well: ")
    assert [(call.name, call.arguments) for call in whole.calls] == [
        ("get_weather", '{"city": "Bonn"}'),
        ("get_weather", '{"city": "Köln"}'),
    ]
    fin = finished(session)
    assert fin.reason == "tool_calls"
    assert 0 < fin.reasoning_tokens < fin.completion_tokens == len(IDS)


async def test_parts_come_while_the_answer_is_made() -> None:
    texts = (await answered(IDS)).texts[0]
    assert sum(isinstance(text, list) for text in texts) > 5
    assert all(isinstance(text, list) or text == "" for text in texts)


@pytest.mark.parametrize("step", [2, 3, 7, 1000])
async def test_how_the_engine_cuts_its_output_makes_no_difference(step: int) -> None:
    one, other = await answered(IDS), await answered(IDS, step=step)
    assert parts_of([*one.texts[0], finished(one).tail]) == parts_of([*other.texts[0], finished(other).tail])


@pytest.mark.parametrize("parsing", [Parsing(tools=[WEATHER]), Parsing(tools=[WEATHER], whole=True)], ids=["stream", "whole"])
async def test_a_resumed_answer_goes_on_where_it_stood_after_every_token(parsing: Parsing) -> None:
    complete = await answered(IDS, parsing=parsing)
    for killed_after in range(1, len(IDS)):
        rest = await answered(IDS, emitted=killed_after, parsing=parsing)
        assert complete.texts[0][:killed_after] + rest.texts[0] == complete.texts[0]
        assert finished(rest) == finished(complete)


async def test_a_whole_answer_comes_with_its_end() -> None:
    session = await answered(IDS, parsing=Parsing(tools=[WEATHER], whole=True))
    assert set(map(str, session.texts[0])) == {""}
    assert [part.kind for part in parts_of([finished(session).tail])] == ["reasoning", "content", "tool", "tool"]


async def test_stop_strings_count_before_anything_is_taken_apart() -> None:
    async with running() as bench:
        await bench.start(asking(stop=["</tool_call>"]))
        sequence = bench.engine.taken[0].id
        for token in IDS:
            bench.step(Output(sequence, [token]))
        await bench.settle()
        assert bench.session.fins[0].stop == "</tool_call>"
        assert bench.session.fins[0].reason == "tool_calls"
        assert [call.arguments for call in bench.session.said().calls] == ['{"city": "Bonn"}']
        assert bench.engine.aborted == [sequence]


async def test_what_the_parsers_need_is_asked_of_the_engine() -> None:
    async with running() as bench:
        await bench.start(asking(Parsing(tools=[WEATHER], choice=NAMED)))
        assert bench.engine.taken[0].guided == {"json": WEATHER["function"]["parameters"]}


async def test_special_tokens_reach_the_parser() -> None:
    class Marked:
        """Says that it needs them."""

        def plan(self, parsing: Any, generation: Any, prompt_ids: Any) -> Any:
            plan = BuiltinParsers(TABLE).plan(Parsing(), generation, prompt_ids)
            plan.requirements = ParseRequirements(skip_special_tokens=False)
            return plan

    async with running(Marked()) as bench:
        await bench.start(asking())
        bench.step(Output(bench.engine.taken[0].id, [1], finish="length"))
        assert bench.session.said().content == "<|im_start|>"


async def test_a_forced_call_cannot_be_resumed_in_the_middle() -> None:
    async with running() as bench:
        await bench.start(asking(Parsing(tools=[WEATHER], choice="required")), emitted=[ids_of("[{")])
        assert [fault.code for fault in bench.session.failed] == ["resume_impossible"]
        assert bench.session.failed[0].retriable
        assert bench.engine.taken == []


async def test_a_forced_call_of_which_nothing_was_given_out_begins_again() -> None:
    async with running() as bench:
        await bench.start(asking(Parsing(tools=[WEATHER], choice="required")), emitted=[[]])
        assert bench.session.failed == []
        assert len(bench.engine.taken) == 1


async def test_a_request_that_cannot_be_taken_apart_is_refused() -> None:
    async with running(BuiltinParsers(TABLE)) as bench:
        await bench.start(asking())
        assert [(fault.code, fault.param) for fault in bench.session.failed] == [("invalid_request", "tool_choice")]


class Failing:
    """A parser that fails on the third token, or at the end."""

    called = False

    def __init__(self, after: int) -> None:
        self._left = after
        self.requirements = ParseRequirements()

    def plan(self, *_: object) -> Failing:
        return self

    def parser(self, *_: object) -> Failing:
        return self

    def push(self, token_id: int, text: str) -> list[Part]:
        self._left -= 1
        if not self._left:
            raise KeyError("arguments")
        return []

    def finish(self, token_id: int | None, text: str) -> list[Part]:
        raise KeyError("arguments")

    def reasoning_tokens(self) -> int:
        return 0


@pytest.mark.parametrize("after", [3, 1000], ids=["in the middle", "at the end"])
async def test_a_parser_that_fails_ends_the_answer_with_an_error(after: int) -> None:
    before = metrics.UNREADABLE._value.get()
    async with running(Failing(after)) as bench:
        await bench.start(asking())
        sequence = bench.engine.taken[0].id
        for token in IDS[:-1]:
            bench.step(Output(sequence, [token]))
        bench.step(Output(sequence, [EOS], finish="stop"))
        await bench.settle()
        assert [fault.code for fault in bench.session.failed] == ["engine_error"]
        assert "arguments" in bench.session.failed[0].message
        assert 0 not in bench.session.fins
        assert metrics.UNREADABLE._value.get() == before + 1


async def test_a_replay_that_the_parser_cannot_read_is_an_error_too() -> None:
    async with running(Failing(2)) as bench:
        await bench.start(asking(), emitted=[IDS[:4]])
        assert [fault.code for fault in bench.session.failed] == ["engine_error"]
        assert bench.engine.taken == []
