"""`headrace.frontend.writers.content_blocks`: any sequence of parts becomes a well-formed sequence of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given

from headrace.broker.messages import Part
from headrace.broker.output_parts import OutputParts
from headrace.frontend.writers.content_blocks import BlockStep, ContentBlocks, PartsOutOfOrder
from tests.support.frontend.answer_parts import call, content, said, thought


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


@given(said())
def test_nothing_but_white_space_between_blocks_is_lost(rows: list[list[Part]]) -> None:
    blocks, _ = played(rows)
    whole = OutputParts()
    for parts in rows:
        whole.add(parts)
    text = "".join(block.text for block in blocks.all if block.kind == "content")
    assert "".join(text.split()) == "".join(whole.content.split())
    assert "".join(block.text for block in blocks.all if block.kind == "reasoning") == whole.reasoning
    calls = [block for block in blocks.all if block.kind == "tool"]
    assert [(c.id, c.name, c.text) for c in calls] == [(c.id, c.name, c.arguments) for c in whole.calls]


def test_white_space_between_calls_makes_no_block() -> None:
    blocks, _ = played([[call(0, "{}", name="a"), content("\n")], [content(" "), call(1, "{}", name="b"), content("\n")]])
    assert [block.kind for block in blocks.all] == ["tool", "tool"]


def test_white_space_before_text_belongs_to_it() -> None:
    blocks, steps = played([[thought("hm")], [content("\n")], [content("\n")], [content("Hello")]])
    assert [block.text for block in blocks.all] == ["hm", "\n\nHello"]
    assert [step.text for step in steps if step.what == "text"] == ["hm", "\n\nHello"]


def test_an_answer_of_white_space_keeps_it() -> None:
    blocks, _ = played([[content("\n")], [content(" ")]])
    assert [(block.kind, block.text) for block in blocks.all] == [("content", "\n ")]


def test_an_answer_without_a_word_has_one_empty_text() -> None:
    blocks, steps = played([])
    assert [(block.kind, block.text) for block in blocks.all] == [("content", "")]
    assert [step.what for step in steps] == ["open", "close"]


def test_pieces_of_one_row_are_one_step() -> None:
    blocks = ContentBlocks()
    assert [s.text for s in blocks.take([content("a"), content("b"), content("c")]) if s.what == "text"] == ["abc"]


def test_going_back_to_a_call_that_has_ended_is_an_error() -> None:
    blocks = ContentBlocks()
    blocks.take([call(0, "{", name="a"), call(1, "{}", name="b"), call(0, "")])  # an empty piece changes nothing
    with pytest.raises(PartsOutOfOrder):
        blocks.take([call(0, "}")])
