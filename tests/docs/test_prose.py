"""Documents are wrapped as the code is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

LONGEST = 128
FILES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


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
