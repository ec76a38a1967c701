"""The built-in parsers: what they make of answers, and that pieces make no difference."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.jobs import Call, OutputParts
from headrace.workers.parsing.stages import Hermes, NamedCall, Plain, Required, Stage, Think
from tests.support.parsing_pieces import cut, cuts, said


def new_id(index: int) -> str:
    return f"id{index}"


def run(stage: Stage, pieces: list[str]) -> OutputParts:
    parts = [part for piece in pieces for part in stage.push(piece)]
    return said([*parts, *stage.finish()])


def stages(opened: bool = False) -> dict[str, Stage]:
    return {
        "plain": Think(Plain(), opened=opened),
        "hermes": Think(Hermes(new_id), opened=opened),
        "named": Think(NamedCall(new_id, "f"), opened=opened),
        "required": Think(Required(new_id), opened=opened),
        "hermes alone": Hermes(new_id),
    }


@given(
    city=st.text(),
    before=st.text(alphabet=st.characters(exclude_characters="<")),
    at=cuts,
)
def test_a_call_comes_out_with_the_arguments_as_written(city: str, before: str, at: list[int]) -> None:
    arguments = json.dumps({"city": city.replace("</tool_call>", "")}, ensure_ascii=False)
    text = f'{before}<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    assert run(Hermes(new_id), cut(text, at)) == OutputParts(content=before, calls=[Call("id0", "get_weather", arguments)])


def test_several_calls_are_numbered_and_text_between_them_is_dropped() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert run(Hermes(new_id), [f"ok{call} and \n{call}, done"]) == OutputParts(
        content="ok", calls=[Call("id0", "f", "{}"), Call("id1", "f", "{}")]
    )


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no JSON</tool_call>",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        "<tool_call>",
        "<tool_call>{",
        "a <tool_ca",
    ],
)
def test_what_is_no_call_comes_out_as_it_was_written(text: str) -> None:
    assert run(Hermes(new_id), [text]) == OutputParts(content=text)


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>a</think>b", "a", "b"),
        (False, "\n <think>a</think>b", "a", "b"),
        (True, "a</think>b", "a", "b"),
        (True, "<think>a</think>b", "a", "b"),
        (True, "never ends", "never ends", ""),
        (False, "a<think>b</think>", "", "a<think>b</think>"),
        (False, "<think>a</think>b</think>c", "a", "b</think>c"),
        (False, "<thi", "", "<thi"),
        (True, "a</thi", "a</thi", ""),
    ],
)
def test_reasoning_is_what_stands_between_the_marks(opened: bool, text: str, reasoning: str, content: str) -> None:
    assert run(Think(Plain(), opened=opened), [text]) == OutputParts(content=content, reasoning=reasoning)


@given(at=cuts)
def test_a_required_list_becomes_calls(at: list[int]) -> None:
    text = ' [ {"name": "f", "parameters": {"x": "]"}}, {"name":"g","parameters":{}} ]\n'
    assert run(Required(new_id), cut(text, at)) == OutputParts(calls=[Call("id0", "f", '{"x": "]"}'), Call("id1", "g", "{}")])


@given(at=cuts)
def test_all_of_the_text_is_the_arguments_of_a_named_call(at: list[int]) -> None:
    assert run(NamedCall(new_id, "f"), cut(' {"x": 1} ', at)) == OutputParts(calls=[Call("id0", "f", '{"x": 1} ')])
