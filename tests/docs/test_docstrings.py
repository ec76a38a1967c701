"""Docstrings of the product are sentences that can be read without the name: none begins with a pronoun or a question word."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("jetstream", "broker", "router", "workers", "frontend", "headrace", "tools")
RIDDLES = frozenset(
    [
        "it",
        "its",
        "itself",
        "they",
        "them",
        "their",
        "this",
        "that",
        "these",
        "those",
        "one",
        "we",
        "our",
        "what",
        "whatever",
        "who",
        "whom",
        "whose",
        "whoever",
        "where",
        "when",
        "which",
        "how",
        "why",
        "whether",
        "nothing",
        "nobody",
        "everybody",
        "somebody",
    ]
)


# Their docstrings are the messages that clients get.
MESSAGES = frozenset({"TooManyConnections", "Draining"})


def _riddles(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if getattr(node, "name", "") in MESSAGES:
                continue
            if words and words[0].lower().partition("'")[0].strip("`,.:;?!") in RIDDLES:
                yield f"{getattr(node, 'name', 'the module')}: {' '.join(words[:8])}"


def test_no_docstring_begins_with_a_pronoun_or_a_question_word() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {riddle}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        for riddle in _riddles(file.read_text())
    ]
    assert not found, "\n".join(found)


def test_a_riddle_is_found() -> None:
    assert list(_riddles('def held():\n    """What is held."""'))
    assert not list(_riddles('def held():\n    """Return the held requests."""'))
