"""Freeform tools as functions: any input comes back as it was, however its arguments are cut and whatever the model wrote."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.frames import Part
from headrace.frontend.chat_schema import CustomTool, Grammar, InputFormat
from headrace.frontend.generation.content_blocks import (
    BlockStep,
    ContentBlocks,
    FreeformParts,
    InputReader,
    PartsOutOfOrder,
    as_function,
    input_in,
)
from headrace.frontend.generation.content_blocks import freeform_arguments_of as arguments_of
from tests.support.frontend.answer_parts import call, content, said

PIECES = st.lists(st.integers(0, 60), max_size=8)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def read(pieces: list[str]) -> str:
    reader = InputReader()
    return "".join(reader.feed(piece) for piece in pieces)


@given(st.text(), PIECES, st.booleans(), st.sampled_from(["{}", "\n {} ", '{{ "input" : {} }}']))
def test_any_input_comes_back_however_it_is_cut(text: str, places: list[int], ascii_only: bool, form: str) -> None:
    written = json.dumps(text, ensure_ascii=ascii_only)
    arguments = form.format(written) if "input" in form else form.format(f'{{"input": {written}}}')
    assert read(cut(arguments, places)) == text
    assert input_in(arguments_of(text)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("*** Begin Patch\n", "*** Begin Patch\n"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("{}", "{}"),
        ("  plain", "  plain"),
        ('{"in put":"x"}', '{"in put":"x"}'),
        ('{"input":"a\nb"}', "a\nb"),
        ('{"input":"cut', "cut"),
        ('{"input":"\\ud83d\\ude00"}', "😀"),
        ('{"input":"\\ud83dx\\ude00\\uzz"}', "\ufffdx\ufffd\ufffdzz"),
        ('{"input":"a"} and more', "a"),
        ('{"inp', ""),
    ],
)
def test_what_models_write(arguments: str, text: str) -> None:
    assert input_in(arguments) == text


def test_only_the_named_tools_are_converted_and_empty_pieces_left_out() -> None:
    freeform = FreeformParts(frozenset({"patch"}))
    first = [Part("content", "hm"), Part("tool", '{"inp', 0, "c0", "patch"), Part("tool", '{"inp', 1, "c1", "other")]
    assert freeform.convert(first) == [first[0], Part("tool", "", 0, "c0", "patch"), first[2]]
    assert (freeform.took(0), freeform.took(1)) == (True, False)
    then = [Part("tool", 'ut":', 0), Part("tool", '"a"', 0), Part("tool", 'ut":"a"}', 1), Part("tool", "}", 0)]
    assert freeform.convert(then) == [Part("tool", "a", 0), Part("tool", 'ut":"a"}', 1)]


def test_a_regex_becomes_a_pattern_and_every_grammar_is_shown() -> None:
    plain = as_function(CustomTool(name="t"))
    assert (plain["description"], plain["parameters"]["required"]) == (None, ["input"])
    regex = InputFormat(type="grammar", grammar=Grammar(syntax="regex", definition="a|b"))
    function = as_function(CustomTool(name="t", description="Do it.", format=regex))
    assert function["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert function["description"] == "Do it.\n\nThe input has to match this regex grammar:\na|b"
    lark = InputFormat(type="grammar", grammar=Grammar(syntax="lark", definition='start: "a"'))
    function = as_function(CustomTool(name="t", format=lark))
    assert "pattern" not in function["parameters"]["properties"]["input"]
    assert 'start: "a"' in function["description"]


def played(rows: list[list[Part]]) -> tuple[ContentBlocks, list[BlockStep]]:
    blocks = ContentBlocks()
    steps = [step for parts in rows for step in blocks.take(parts)]
    return blocks, steps + blocks.end()


@given(said())
def test_any_sequence_of_parts_opens_fills_and_closes_one_block_after_the_other(rows: list[list[Part]]) -> None:
    blocks, steps = played(rows)
    opened = -1
    is_open = False
    texts: dict[int, str] = {}
    for step in steps:
        if step.what == "open":
            assert not is_open
            opened += 1
            is_open = True
        else:
            assert is_open
            is_open = step.what != "close"
        assert step.block.index == opened
        texts[opened] = texts.get(opened, "") + step.text
    assert not is_open
    assert opened + 1 == len(blocks.all) >= 1
    assert [texts[block.index] for block in blocks.all] == [block.text for block in blocks.all]
    assert all(a.kind != b.kind or a.kind == "tool" for a, b in zip(blocks.all, blocks.all[1:], strict=False))


def test_an_answer_of_white_space_keeps_it() -> None:
    blocks, _ = played([[content("\n")], [content(" ")]])
    assert [(block.kind, block.text) for block in blocks.all] == [("content", "\n ")]


def test_going_back_to_a_call_that_has_ended_is_an_error() -> None:
    blocks = ContentBlocks()
    blocks.take([call(0, "{", name="a"), call(1, "{}", name="b"), call(0, "")])  # an empty piece changes nothing
    with pytest.raises(PartsOutOfOrder):
        blocks.take([call(0, "}")])
