"""A chat with a service that answers from a list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.base.errors import CommandError
from headrace.chat.conversation import Conversation
from headrace.chat.run import Chat, _chosen, figures
from headrace.chat.streamed_answer import Answer, NoAnswer


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
