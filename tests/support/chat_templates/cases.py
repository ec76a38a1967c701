"""The fixtures of this folder as test cases. Imports nothing but the standard library."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BUNDLED = FOLDER.parents[2] / "workers" / "assets" / "smollm2"
NOW = datetime(2026, 1, 15, 10, 30, tzinfo=None)  # noqa: DTZ001  # templates print local time


class FrozenTime(datetime):
    """In place of `datetime` where `strftime_now` looks for it."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return NOW


@dataclass(frozen=True)
class Conversation:
    """A call of a renderer. `tools` are OpenAI's."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One model's template. `expected` is by name of the conversation: {"text": …} or {"refused": the words}."""

    name: str
    source: str
    special_tokens: dict[str, str]
    expected: dict[str, dict[str, str]]


def conversations() -> list[Conversation]:
    tools = json.loads((FOLDER / "tools.json").read_text())
    told = json.loads((FOLDER / "conversations.json").read_text())
    return [
        Conversation(name=name, **{**options, **({"tools": tools} if "tools" in options else {})})
        for name, options in told.items()
    ]


def names() -> list[str]:
    return ["smollm2", *sorted(path.parent.name for path in FOLDER.glob("*/chat_template.jinja"))]


def load(name: str) -> Family:
    """`expected` is empty where nothing has been written yet."""
    folder = FOLDER / name
    source = (BUNDLED if name == "smollm2" else folder) / "chat_template.jinja"
    expected = folder / "expected.json"
    return Family(
        name=name,
        source=source.read_text(),
        special_tokens=json.loads((folder / "special_tokens.json").read_text()),
        expected=json.loads(expected.read_text()) if expected.exists() else {},
    )
