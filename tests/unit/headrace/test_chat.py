"""What a person types, and what the model is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.base.errors import CommandError
from headrace.chat import (
    COMMANDS,
    Answer,
    Chat,
    Command,
    Conversation,
    NoAnswer,
    _chosen,
    ask,
    figures,
    help_text,
    read_events,
    read_line,
)


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("hello", "hello"),
        ("  hello ", "hello"),
        ("", ""),
        ("/model a/b ", Command("/model", "a/b")),
        ("/system be short", Command("/system", "be short")),
        ("/exit", Command("/quit")),
        ("/nothing", Command("/help", "/nothing")),
        ("//etc/passwd", "/etc/passwd"),
    ],
)
def test_a_line_is_a_message_or_a_command(line: str, read: Command | str) -> None:
    assert read_line(line) == read


def test_messages_go_on_in_turns_behind_the_system_message() -> None:
    chat = Conversation("m", system="be short")
    chat.ask("one")
    chat.answered("two")
    assert chat.ask("three") == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ],
    }
    chat.answered("")  # no answer came
    assert [message["content"] for message in chat.ask("four")["messages"]] == ["be short", "one", "two", "four"]
    chat.clear()
    assert len(chat.ask("five")["messages"]) == 2


def test_help_lists_every_command_and_names_the_unknown_one() -> None:
    assert all(name in help_text() for name in COMMANDS)
    assert help_text("/nothing").startswith("there is no command '/nothing'")


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


class Listed:
    """Answers with the next of `answers`; an exception among its pieces is raised."""

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.closed = 0

    def models(self) -> list[str]:
        return ["one", "two"]

    def ask(self, body: dict[str, Any], answer: Answer) -> Iterator[str]:
        self.bodies.append(body)
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                answer.pieces.append(piece)
                yield piece
        finally:
            self.closed += 1


class Terminal:
    """Types `lines`, and keeps what is written."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.out = ""

    def type(self) -> str | None:
        return self.lines.pop(0) if self.lines else None

    def write(self, text: str) -> None:
        self.out += text


def chat(service: Listed, *lines: str) -> tuple[Terminal, Chat]:
    terminal = Terminal(*lines)
    talk = Chat(service, Conversation("one"), terminal.write)
    while talk.turn(terminal.type):
        pass
    return terminal, talk


def test_answers_are_written_as_they_arrive_and_belong_to_the_conversation() -> None:
    service = Listed(["Hel", "lo"], ["Bye"])
    terminal, _ = chat(service, "hi", "", "/system be short", "bye")
    assert "Hello\n" in terminal.out
    assert [message["content"] for message in service.bodies[1]["messages"]] == ["be short", "hi", "Hello", "bye"]
    assert service.closed == 2


def test_an_answer_that_is_stopped_counts_as_far_as_it_came_and_is_cancelled() -> None:
    service = Listed(["Hel", KeyboardInterrupt()], ["x"])
    terminal, _ = chat(service, "hi", "more")
    assert "(stopped)" in terminal.out
    assert service.bodies[1]["messages"][1] == {"role": "assistant", "content": "Hel"}
    assert service.closed == 2


def test_a_question_without_an_answer_is_told_and_taken_back() -> None:
    service = Listed([NoAnswer("the server said no")], ["x"])
    terminal, _ = chat(service, "hi", "again")
    assert "the server said no" in terminal.out
    assert service.bodies[1]["messages"] == [{"role": "user", "content": "again"}]


def test_commands_change_the_model_and_what_is_shown() -> None:
    service = Listed(["a"], ["b"])
    terminal, talk = chat(
        service, "/model", "/model three", "/model two", "/stats", "hi", "/clear", "/nothing", "/quit", "never"
    )
    assert "  one\n  two\n" in terminal.out
    assert "no model 'three' is served; served: one, two" in terminal.out
    assert service.bodies[0]["model"] == "two"
    assert "[" not in terminal.out, "no figures"
    assert not talk.conversation.messages
    assert "there is no command '/nothing'" in terminal.out
    assert terminal.lines == ["never"]


def test_the_first_served_model_is_taken() -> None:
    assert _chosen(Listed(), None) == "one"
    nothing = Listed()
    nothing.models = list  # type: ignore[method-assign]
    with pytest.raises(CommandError, match="no model is served"):
        _chosen(nothing, None)


def test_figures_name_first_token_speed_tokens_and_worker() -> None:
    answer = Answer(worker="worker-1", pieces=["a", "b"], arrived_s=[10.5, 11.5], tokens=11, prompt_tokens=20, cached_tokens=16)
    assert figures(answer, 10.0, 12.5) == (
        "[first token 500 ms, 5 tokens/s, 20 prompt tokens (16 cached), 11 in the answer, worker-1]"
    )
    assert figures(Answer(), 0.0, 1.0) == "[no text]"
