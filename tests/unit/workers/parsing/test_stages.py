"""The built-in parsers: what they make of answers, and that pieces make no difference."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.jobs import Call, OutputParts
from headrace.workers.parsing.stages import Hermes, NamedCall, Plain, Required, Stage, Think
from tests.support.parsing_pieces import cut, cuts, said

FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "</",
        "<",
        "\n",
        " ",
        '{"name": "f", "arguments": {"x": [1, "a}"]}}',
        '{"arguments": {"y": "\\"</tool\\""}, "name": "g"}',
        '{"name": 3}',
        "[",
        "]",
        ",",
        '{"name": "f", "parameters": {"z": null}}',
        '{"name": "f", "param',
        "{",
        "}",
        '"',
        "Grüße 🌊",
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


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


@given(text=TEXTS, at=cuts, opened=st.booleans(), name=st.sampled_from(sorted(stages())))
def test_pieces_make_no_difference(text: str, at: list[int], opened: bool, name: str) -> None:
    assert run(stages(opened)[name], cut(text, at)) == run(stages(opened)[name], [text])


@given(text=TEXTS, at=cuts)
def test_without_marks_everything_is_content(text: str, at: list[int]) -> None:
    text = text.replace("<", "(")
    assert run(Think(Hermes(new_id), opened=False), cut(text, at)) == OutputParts(content=text)


@given(
    city=st.text(),
    before=st.text(alphabet=st.characters(exclude_characters="<")),
    at=cuts,
)
def test_a_call_comes_out_with_the_arguments_as_written(city: str, before: str, at: list[int]) -> None:
    arguments = json.dumps({"city": city.replace("</tool_call>", "")}, ensure_ascii=False)
    text = f'{before}<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    assert run(Hermes(new_id), cut(text, at)) == OutputParts(content=before, calls=[Call("id0", "get_weather", arguments)])


def test_arguments_come_as_they_are_written() -> None:
    stage = Hermes(new_id)
    stage.push('<tool_call>{"name": "f", "arguments": {"x": ')
    assert [part.text for part in stage.push("1")] == ["1"]


def test_several_calls_are_numbered_and_text_between_them_is_dropped() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert run(Hermes(new_id), [f"ok{call} and \n{call}, done"]) == OutputParts(
        content="ok", calls=[Call("id0", "f", "{}"), Call("id1", "f", "{}")]
    )


def test_arguments_before_the_name_wait_for_it() -> None:
    assert run(Hermes(new_id), ['<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>']).calls == [
        Call("id0", "f", '{"x": 1}')
    ]


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


def test_a_call_that_breaks_off_keeps_what_there_was() -> None:
    assert run(Hermes(new_id), ['<tool_call>{"name": "f", "arguments": {"x": "ab']).calls == [Call("id0", "f", '{"x": "ab')]


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


def test_what_is_no_list_of_calls_says_nothing() -> None:
    assert run(Required(new_id), ["I would rather not [{"]) == OutputParts()


@given(at=cuts)
def test_all_of_the_text_is_the_arguments_of_a_named_call(at: list[int]) -> None:
    assert run(NamedCall(new_id, "f"), cut(' {"x": 1} ', at)) == OutputParts(calls=[Call("id0", "f", '{"x": 1} ')])
