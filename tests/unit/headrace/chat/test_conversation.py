"""What a person types, and what the model is told."""

from __future__ import annotations

import pytest

from headrace.chat.conversation import COMMANDS, Command, Conversation, help_text, read_line


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
