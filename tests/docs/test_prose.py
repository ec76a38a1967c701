"""Documents are wrapped as the code is, and processes are not spoken of as persons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

LONGEST = 128
FILES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]

PERSONS = re.compile(r"\b(?:somebody|nobody|anybody|everybody|whoever)\b", re.IGNORECASE)
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def long_lines(text: str) -> list[int]:
    """Numbers of the lines that are too long. Tables, drawings and commands cannot be wrapped."""
    found, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "    ")) and len(line) > LONGEST:
            found.append(number)
    return found


@pytest.mark.parametrize("file", sorted(FILES), ids=lambda file: file.name)
def test_lines_of_prose_are_wrapped(file: Path) -> None:
    assert not long_lines(file.read_text())


def test_a_long_line_is_found_and_a_table_is_left_alone() -> None:
    long = "word " * 40
    assert long_lines(f"{long}\n| {long} |\n```\n{long}\n```\n\n    {long}\n") == [1]


@pytest.mark.parametrize("file", sorted(FILES), ids=lambda file: file.name)
def test_processes_are_not_spoken_of_as_persons(file: Path) -> None:
    assert not PERSONS.findall(CODE.sub("", file.read_text())), 'say "a worker", "the router", "a client"'


def test_such_a_word_is_found_in_prose_and_left_alone_in_commands() -> None:
    assert PERSONS.findall("Nobody waits.") == ["Nobody"]
    assert not PERSONS.findall(CODE.sub("", "```sh\nheadrace worker role nobody decode\n```\nand `nobody`"))
