"""What an answer says, put together again from what its tokens released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from headrace.broker.messages import Part, Text


@dataclass(slots=True)
class Call:
    """One tool call; `arguments` is JSON text, or what there is of it."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class OutputParts:
    """One choice of an answer that was taken apart, growing part by part."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
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
    """All parts in order; plain text counts as content."""
    parts: list[Part] = []
    for text in texts:
        if isinstance(text, str):
            if text:
                parts.append(Part("content", text))
        else:
            parts += text
    return parts


def plain(texts: Sequence[Text]) -> str:
    """The text of an answer that was not taken apart; of one that was, everything it says."""
    try:
        return "".join(cast("Sequence[str]", texts))
    except TypeError:
        return "".join(part.text for part in parts_of(texts))
