"""Every key of every response, item and event: what the `openai` package and the Open Responses specification require."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from openai.types.responses import Response
from pydantic import TypeAdapter

from headrace.broker.errors import JobFailed
from headrace.broker.jobs import Job
from tests.support.frontend.answer_parts import call, content, parts_row, say_parts, thought
from tests.support.frontend.fakes import Step
from tests.support.frontend.open_responses import problems
from tests.support.frontend.responses_client import Client, events_of
from tests.support.frontend.responses_machine import check_shape

TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "function", "name": "g", "description": "d", "strict": False},
]
SHAPE = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
RICH = say_parts([thought("hm")], [content("Hello")], [call(0, "{}", name="f")], reason="tool_calls", reasoning_tokens=1)
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS, "tool_choice": "required"},
    "named tool": {"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}},
    "schema": {"text": SHAPE},
    "everything": {
        "instructions": "Be kind.",
        "max_output_tokens": 50,
        "max_tool_calls": 0,
        "metadata": {"a": "b"},
        "user": "me",
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "temperature": 0,
        "top_p": 0.5,
        "truncation": "auto",
        "reasoning": {"effort": "low"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "priority",
        "parallel_tool_calls": False,
        "store": False,
        "text": {"verbosity": "low"},
    },
}


def broken(job: Job) -> Iterable[Step]:
    yield [parts_row([content("Hel")])]
    yield JobFailed("the engine died")


def check(response: dict[str, Any]) -> None:
    TypeAdapter(Response).validate_python(response)
    assert problems(response) == []


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_whole_answers_have_every_key(asked: dict[str, Any]) -> None:
    answer = await Client(RICH).create(**asked)
    assert answer.status == 200, answer.body
    check(answer.json())


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_every_event_has_every_key(asked: dict[str, Any]) -> None:
    events = await Client(RICH).stream(**asked)
    for event in events:
        check_shape(event)
    assert [event["response"]["usage"] for event in events[:2]] == [None, None]
    assert events[-1]["response"]["usage"]["output_tokens"] == 3


async def test_penalties_are_those_in_effect() -> None:
    answer = (await Client().create(presence_penalty=0.5, frequency_penalty=-1)).json()
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.5, -1)
    answer = (await Client().create()).json()
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0, 0)


async def test_no_calls_of_built_in_tools_may_be_asked_for() -> None:
    answer = await Client().create(max_tool_calls=0)
    assert (answer.status, answer.json()["max_tool_calls"]) == (200, 0)
    assert (await Client().create(max_tool_calls=-1)).status == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_an_incomplete_answer_has_every_key(stream: bool) -> None:
    client = Client(say_parts([content("Hel")], [content("lo")], reason="length"))
    answer = await client.create(max_output_tokens=2, stream=stream)
    if stream:
        for event in events_of(answer):
            check_shape(event)
        return
    check(answer.json())
    assert answer.json()["status"] == "incomplete"


async def test_a_failed_answer_has_every_key() -> None:
    events = await Client(broken).stream()
    for event in events:
        check_shape(event)
    assert events[-1]["type"] == "response.failed"


def test_the_check_notices_what_is_missing_and_what_is_null() -> None:
    assert problems({"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning", "id": None}}) == [
        "response.output_item.added has no sequence_number",
        "response.output_item.added.item has no summary",
        "response.output_item.added.item.id is null",
    ]
