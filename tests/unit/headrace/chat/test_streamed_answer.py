"""Reading a streamed answer: its text, its usage, and streams that end too early."""

from __future__ import annotations

import json

import pytest

from headrace.chat.streamed_answer import Answer, NoAnswer, ask, read_events


def lines(*events: object, done: bool = True) -> list[bytes]:
    found = [f"data: {json.dumps(event)}\n".encode() for event in events]
    return [*(part for line in found for part in (line, b"\n")), *([b"data: [DONE]\n"] if done else [])]


def chunk(text: str | None = None, **more: object) -> dict[str, object]:
    return {"id": "chatcmpl-r1", "choices": [{"delta": {"content": text} if text is not None else {}, **more}]}


def test_pieces_times_usage_and_the_end_are_taken_from_the_events() -> None:
    answer = Answer()
    usage = {"id": "chatcmpl-r1", "choices": [], "usage": {"completion_tokens": 3}}
    events = read_events(lines(chunk(""), chunk("one"), chunk(" two"), chunk(finish_reason="stop"), usage))
    texts = [answer.take(event, float(n)) for n, event in enumerate(events)]
    assert texts == ["", "one", " two", "", ""]
    assert (answer.text, answer.arrived_s, answer.tokens) == ("one two", [1.0, 2.0], 3)
    assert (answer.finish_reason, answer.request_id) == ("stop", "r1")


def test_a_stream_without_its_last_event_is_an_error() -> None:
    with pytest.raises(NoAnswer, match="before its last event"):
        list(read_events(lines(chunk("one"), done=False)))


def test_an_error_in_the_stream_is_told_with_its_code() -> None:
    with pytest.raises(NoAnswer, match="engine_error: it broke"):
        Answer().take({"error": {"code": "engine_error", "message": "it broke"}}, 0.0)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(NoAnswer, match=r"http://127\.0\.0\.1:9"):
        list(ask("http://127.0.0.1:9", {}, Answer()))
