"""Docstrings and comments of the product are plain: none begins with a pronoun or a question word, or speaks of persons.

A function's docstring begins with a verb and not with an article, so that it says what the call does.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("jetstream", "broker", "router", "workers", "frontend", "headrace", "tools", "benchmarks", "deploy")
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


ARTICLES = frozenset(["the", "a", "an", "another", "every", "all", "no", "there"])
PERSONS = re.compile(r"\b(?:(?:some|any|every)(?:body|one)|nobody|whoever)\b", re.IGNORECASE)

# Their docstrings are the messages that clients get.
MESSAGES = frozenset({"TooManyConnections", "Draining"})


def _riddles(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if getattr(node, "name", "") in MESSAGES:
                continue
            first = words[0].lower().partition("'")[0].strip("`,.:;?!") if words else ""
            if first in RIDDLES or (_is_call(node) and first in ARTICLES):
                yield f"{getattr(node, 'name', 'the module')}: {' '.join(words[:8])}"


def _is_call(node: ast.AST) -> bool:
    """Return whether a node is a function that is called by its name: no property, and no method such as `__init__`."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
        return False
    names = {getattr(mark, "id", getattr(mark, "attr", "")) for mark in node.decorator_list}
    return not names & {"property", "setter", "cached_property"}


def _persons(text: str) -> Iterator[str]:
    """Find comments and docstrings that speak of persons. Other strings are left alone: they may be names."""
    if not PERSONS.search(text):  # splitting all files into tokens would take seconds
        return
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and PERSONS.search(token.string):
            yield f"{token.start[0]}: {token.string}"
    for docstring in docstrings - {None}:
        if docstring is not None and (found := PERSONS.search(docstring)):
            yield docstring[max(0, found.start() - 40) : found.end() + 40].replace("\n", " ")


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _files(*folders: str) -> Iterator[Path]:
    return (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))


def test_no_docstring_begins_with_a_pronoun_or_a_question_word() -> None:
    found = [f"{file.relative_to(ROOT)}: {riddle}" for file in _files(*FOLDERS) for riddle in _riddles(file.read_text())]
    assert not found, "\n".join(found)


def test_no_comment_or_docstring_speaks_of_persons() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {place}" for file in _files(*FOLDERS, "examples") for place in _persons(file.read_text())
    ]
    assert not found, "\n".join(found)


def test_a_riddle_is_found() -> None:
    assert list(_riddles('def held():\n    """What is held."""'))
    assert list(_riddles('def held():\n    """The held requests."""'))
    assert not list(_riddles('def held():\n    """Return the held requests."""'))
    assert not list(
        _riddles('class Held:\n    """The held requests."""\n    @property\n    def at(self):\n        """The time."""')
    )


def test_a_person_is_found_in_comments_and_docstrings_alone() -> None:
    assert list(_persons("x = 1  # nobody waits"))
    assert list(_persons('def held():\n    """Hold it for\n\n    somebody."""'))
    assert not list(_persons('NOBODY = "nobody"'))
