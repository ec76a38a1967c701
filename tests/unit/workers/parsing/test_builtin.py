"""A whole worker's built-in parsers: from a request to the parts of its answer."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.jobs import Call, OutputParts
from headrace.broker.messages.frames import Part
from headrace.broker.messages.requests import Generation, Parsing
from headrace.workers.errors import RequestInvalid
from headrace.workers.parsing.builtin import BuiltinParsers
from headrace.workers.parsing.interface import finish_reason
from tests.support.parsing_pieces import CLOCK, PARAMETERS, WEATHER, said
from tests.support.runtime_bench import TABLE, ids_of

NAMED = {"type": "function", "function": {"name": "get_weather"}}
ANSWER = '<think>hm</think>ok<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'


def parts_for(text: str, parsing: Parsing, *, prompt: str = "Hi", tool: str | None = "hermes", choice: int = 0) -> list[Part]:
    parsers = BuiltinParsers(TABLE, tool=tool, reasoning="think")
    parser = parsers.plan(parsing, Generation(token_ids=b""), ids_of(prompt)).parser("r1", choice)
    parts = [part for token in ids_of(text) for part in parser.push(token, TABLE.token_bytes(token).decode())]
    return parts + parser.finish(None, "")


def test_reasoning_content_and_calls_are_told_apart() -> None:
    whole = said(parts_for(ANSWER, Parsing(tools=[WEATHER])))
    assert (whole.reasoning, whole.content) == ("hm", "ok")
    assert [(call.name, call.arguments) for call in whole.calls] == [("get_weather", '{"city": "Bonn"}')]


def test_a_whole_answer_comes_at_the_end_in_as_few_parts_as_it_has() -> None:
    parsers = BuiltinParsers(TABLE, tool="hermes", reasoning="think")
    parser = parsers.plan(Parsing(tools=[WEATHER], whole=True), Generation(token_ids=b""), [1]).parser("r1", 0)
    assert [parser.push(token, TABLE.token_bytes(token).decode()) for token in ids_of(ANSWER)] == [[]] * len(ids_of(ANSWER))
    assert [part.kind for part in parser.finish(None, "")] == ["reasoning", "content", "tool"]


def test_ids_of_calls_depend_on_request_choice_and_place_only() -> None:
    twice = ANSWER + ANSWER[ANSWER.index("<tool_call>") :]
    first, again = (said(parts_for(twice, Parsing(tools=[WEATHER]))) for _ in range(2))
    other = said(parts_for(twice, Parsing(tools=[WEATHER]), choice=1))
    ids = [call.id for call in first.calls]
    assert ids == [call.id for call in again.calls]
    assert len({*ids, *(call.id for call in other.calls)}) == 4
    assert all(call_id.startswith("call_") for call_id in ids)


def test_hidden_reasoning_is_left_out_and_still_counted() -> None:
    parsers = BuiltinParsers(TABLE, reasoning="think")
    parser = parsers.plan(Parsing(reasoning=False), Generation(token_ids=b""), [1]).parser("r1", 0)
    ids = ids_of("<think>one two</think>three")
    parts = [part for token in ids for part in parser.push(token, TABLE.token_bytes(token).decode())]
    assert said(parts + parser.finish(None, "")) == OutputParts(content="three")
    assert parser.reasoning_tokens() > 0


def test_reasoning_that_the_prompt_has_opened_goes_on_in_the_answer() -> None:
    assert said(parts_for("hm</think>ok", Parsing(), prompt="<think>\n")) == OutputParts(content="ok", reasoning="hm")


def test_only_the_first_call_comes_out_when_there_may_be_one() -> None:
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    whole = said(parts_for(call + call, Parsing(tools=[CLOCK], parallel=False)))
    assert [call.name for call in whole.calls] == ["clock"]


def test_calls_that_must_be_made_are_forced_as_json_without_a_parser() -> None:
    parsers = BuiltinParsers(TABLE)
    required = parsers.plan(
        Parsing(tools=[WEATHER, CLOCK], choice="required"), Generation(token_ids=b""), [1]
    ).requirements.guided
    assert required is not None
    assert [call["properties"]["name"]["enum"] for call in required["json"]["items"]["anyOf"]] == [["get_weather"], ["clock"]]
    named = parsers.plan(Parsing(tools=[WEATHER], choice=NAMED), Generation(token_ids=b""), [1]).requirements.guided
    assert named == {"json": PARAMETERS}
    made = said(parts_for('{"city": "Bonn"}', Parsing(tools=[WEATHER], choice=NAMED), tool=None))
    assert [(call.name, call.arguments) for call in made.calls] == [("get_weather", '{"city": "Bonn"}')]


def test_one_call_at_most_is_said_in_the_schema() -> None:
    plan = BuiltinParsers(TABLE).plan(Parsing(tools=[CLOCK], choice="required", parallel=False), Generation(token_ids=b""), [1])
    assert plan.requirements.guided is not None
    assert plan.requirements.guided["json"]["maxItems"] == 1


def test_definitions_of_all_tools_come_to_the_top_of_the_schema() -> None:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    plan = BuiltinParsers(TABLE).plan(Parsing(tools=[tool], choice="required"), Generation(token_ids=b""), [1])
    assert plan.requirements.guided is not None
    schema = plan.requirements.guided["json"]
    assert schema["$defs"] == {"X": {"type": "string"}}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]


@pytest.mark.parametrize(
    ("parsing", "param"),
    [
        (Parsing(tools=[WEATHER], choice={"type": "function", "function": {"name": "nobody"}}), "tool_choice"),
        (Parsing(tools=[WEATHER], choice="auto"), "tool_choice"),
        (Parsing(tools=[{"type": "other"}], choice="required"), "tools"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(parsing: Parsing, param: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        BuiltinParsers(TABLE).plan(parsing, Generation(token_ids=b""), [1])
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("choice", "whole", "called", "reason", "told"),
    [
        ("auto", False, True, "stop", "tool_calls"),
        ("auto", False, True, "length", "length"),
        ("auto", False, False, "stop", "stop"),
        ("auto", True, True, "length", "tool_calls"),
        ("auto", True, False, "stop", "stop"),
        ("required", False, True, "stop", "tool_calls"),
        ("required", True, False, "stop", "tool_calls"),
        ("required", True, True, "length", "length"),
        (NAMED, False, True, "stop", "stop"),
        (NAMED, True, True, "stop", "stop"),
        ("none", True, False, "stop", "stop"),
    ],
)
def test_the_reason_of_the_end_is_what_vllms_server_says(
    choice: Any, whole: bool, called: bool, reason: Any, told: str
) -> None:
    assert finish_reason(Parsing(tools=[WEATHER], choice=choice, whole=whole), reason, called=called) == told


def test_calls_with_ids_survive_being_put_together() -> None:
    assert said([Part("tool", "{", 0, "a", "f"), Part("tool", "}", 0)]).calls == [Call("a", "f", "{}")]
