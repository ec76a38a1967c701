"""Answers of every API as the ledger's client takes them apart: the right one is answered, and every wrong one is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace.tools.chaos.answer_checker import AnswerChecker, faulted
from headrace.tools.chaos.api_questions import TOOL, ApiQuestion
from headrace.tools.chaos.ledger import Outcome

TEXT = "some words that are said once and in this order"
NAMES = ("a", "b")
ARGUMENTS = json.dumps({"names": list(NAMES)})
SAID = ApiQuestion(number=1, api="chat", stream=True, asked="?", content=TEXT, reasoning="thought")
CALLING = replace(SAID, content="", reasoning="", calls=(NAMES,))


def chat(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def called(name: str | None, arguments: str) -> dict[str, Any]:
    return chat({"tool_calls": [{"index": 0, "function": {"name": name, "arguments": arguments}}]})


TALK = [chat({"reasoning_content": "thought"}), chat({"content": TEXT[:9]}), chat({"content": TEXT[9:]}), chat({}, "stop")]
CALL = [called(TOOL, ARGUMENTS[:5]), called(None, ARGUMENTS[5:]), chat({}, "tool_calls")]
RESPONSE = [
    {"type": "response.output_text.delta", "delta": TEXT},
    {"type": "response.completed", "response": {"status": "completed"}},
]
RESPONSE_CALL = [
    {"type": "response.output_item.added", "output_index": 0, "item": {"type": "function_call", "name": TOOL}},
    {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": ARGUMENTS},
    {"type": "response.completed", "response": {"status": "completed"}},
]
MESSAGE = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    {"type": "message_stop"},
]
MESSAGE_CALL = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "name": TOOL}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": ARGUMENTS}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]
PLAIN = replace(SAID, reasoning="")
STREAMS: list[tuple[ApiQuestion, list[dict[str, Any]]]] = [
    (SAID, TALK),
    (CALLING, CALL),
    (replace(PLAIN, api="responses"), RESPONSE),
    (replace(CALLING, api="responses"), RESPONSE_CALL),
    (replace(PLAIN, api="messages"), MESSAGE),
    (replace(CALLING, api="messages"), MESSAGE_CALL),
]


def heard(question: ApiQuestion, stream: list[dict[str, Any]]) -> Outcome:
    checker = AnswerChecker(question)
    for event in stream:
        if (ended := checker.feed(event)) is not None:
            return ended.outcome
    return checker.ended().outcome


@pytest.mark.parametrize(("question", "stream"), STREAMS)
def test_a_stream_is_right_and_no_longer_when_anything_is_missing_or_comes_twice(
    question: ApiQuestion, stream: list[dict[str, Any]]
) -> None:
    assert heard(question, stream) is Outcome.ANSWERED
    for at, event in enumerate(stream):
        if event.get("type") in ("message_stop", "content_block_start") and "name" not in str(event):
            continue  # says nothing of its own
        assert heard(question, stream[:at] + stream[at + 1 :]) is not Outcome.ANSWERED, event
        if "delta" in str(event.get("type")) and "stop_reason" not in str(event):
            assert heard(question, [*stream[: at + 1], event, *stream[at + 1 :]]) is not Outcome.ANSWERED, event


WHOLE: list[tuple[ApiQuestion, dict[str, Any]]] = [
    (SAID, {"choices": [{"message": {"content": TEXT, "reasoning_content": "thought"}, "finish_reason": "stop"}]}),
    (
        replace(PLAIN, api="responses"),
        {"status": "completed", "output": [{"type": "message", "content": [{"type": "output_text", "text": TEXT}]}]},
    ),
    (
        replace(CALLING, api="responses"),
        {"status": "completed", "output": [{"type": "function_call", "name": TOOL, "arguments": ARGUMENTS}]},
    ),
    (replace(PLAIN, api="messages"), {"stop_reason": "end_turn", "content": [{"type": "text", "text": TEXT}]}),
    (
        replace(CALLING, api="messages"),
        {"stop_reason": "tool_use", "content": [{"type": "tool_use", "name": TOOL, "input": {"names": list(NAMES)}}]},
    ),
]


@pytest.mark.parametrize(("question", "answer"), WHOLE)
def test_a_whole_answer_is_compared_part_by_part(question: ApiQuestion, answer: dict[str, Any]) -> None:
    assert AnswerChecker(question).check_whole(answer).outcome is Outcome.ANSWERED
    other = replace(question, calls=(("c",),)) if question.calls else replace(question, content=TEXT + " more")
    assert AnswerChecker(other).check_whole(answer).outcome in (Outcome.MISSING, Outcome.WRONG)


def test_log_probabilities_must_spell_the_text() -> None:
    question = replace(PLAIN, logprobs=True)

    def answer(*tokens: str) -> dict[str, Any]:
        entries = [{"token": token} for token in tokens]
        return {"choices": [{"message": {"content": TEXT}, "finish_reason": "stop", "logprobs": {"content": entries}}]}

    assert AnswerChecker(question).check_whole(answer(TEXT[:4], TEXT[4:], "<end>")).outcome is Outcome.ANSWERED
    assert AnswerChecker(question).check_whole(answer(TEXT[:4])).outcome is Outcome.WRONG


def test_three_crashes_are_told_from_a_frontend_that_leaves() -> None:
    assert faulted({"message": "the request was running on 3 workers when each of them crashed"}).outcome is Outcome.POISONED
    assert faulted({"type": "overloaded_error", "message": "shutting down"}).outcome is Outcome.CUT
