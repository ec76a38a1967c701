"""Joins the text and parts that an answer's tokens released into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from headrace.broker.messages import Part, Text


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` is JSON text, or the part of it that has arrived."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class OutputParts:
    """The content, reasoning and calls of one choice, growing part by part."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Append parts in the order of their tokens."""
        for part in parts:
            if part.kind == "content":
                self.content += part.text
            elif part.kind == "reasoning":
                self.reasoning += part.text
            else:
                while len(self.calls) <= part.index:
                    self.calls.append(Call())
                call = self.calls[part.index]
                call.id = part.id or call.id
                call.name = part.name or call.name
                call.arguments += part.text


def parts_of(texts: Sequence[Text]) -> list[Part]:
    """Return all parts in order; plain text counts as content."""
    parts: list[Part] = []
    for text in texts:
        if isinstance(text, str):
            if text:
                parts.append(Part("content", text))
        else:
            parts += text
    return parts


def plain(texts: Sequence[Text]) -> str:
    """Return the text of an answer without parts; of one with parts, the text of all of them."""
    try:
        return "".join(cast("Sequence[str]", texts))
    except TypeError:
        return "".join(part.text for part in parts_of(texts))
