"""Keeps a conversation, and reads what a person types: a message, or a command that begins with a slash."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COMMANDS = {
    "/model": "NAME  talk to another model; without a name, list them",
    "/system": "TEXT  what the model is told first; without a text, nothing",
    "/stats": "show or hide the figures behind each answer",
    "/clear": "forget what was said",
    "/help": "list the commands",
    "/quit": "end (Ctrl-D too)",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command with what stands behind it."""

    name: str
    argument: str = ""


def read_line(text: str) -> Command | str:
    """Return the command in a line, or the message; `//` begins a message with one slash. An unknown command is `/help`."""
    line = text.strip()
    if line.startswith("//"):
        return line[1:]
    if not line.startswith("/"):
        return line
    name, _, argument = line.partition(" ")
    if name == "/exit":
        name = "/quit"
    return Command(name, argument.strip()) if name in COMMANDS else Command("/help", name)


def help_text(unknown: str = "") -> str:
    """Return the list of commands; `unknown` is one that is not among them."""
    lines = [f"there is no command {unknown!r}"] if unknown else []
    return "\n".join([*lines, *(f"  {name:<8} {about}" for name, about in COMMANDS.items())])


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the model that they go to."""

    model: str
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> dict[str, Any]:
        """Add a person's message and return the body of the request."""
        self.messages.append({"role": "user", "content": text})
        first = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*first, *self.messages]}

    def answered(self, text: str) -> None:
        """Add the model's answer. An empty one takes the question back, so that messages go on in turns."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def clear(self) -> None:
        """Forget what was said; model and system message stay."""
        self.messages.clear()
