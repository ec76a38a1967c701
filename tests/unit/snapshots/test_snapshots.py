"""What others can see of Headrace is what it was, or the change of it is in the commit."""

from __future__ import annotations

import difflib

import pytest

from tests.unit.snapshots.photographs import FILES, SNAPSHOTS, taken

SHOWN = 40  # lines of a difference


def difference(name: str, before: str, now: str) -> str:
    """The lines that differ, the first of them where there are many, and what to do."""
    lines = [
        line
        for line in difflib.unified_diff(before.splitlines(), now.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    more = [f"… and {len(lines) - SHOWN} more lines"] if len(lines) > SHOWN else []
    wanted = "if this is meant: python -m tests.unit.snapshots, and a line in CHANGELOG.md"
    return "\n".join([f"{name} has changed ({wanted}):", *lines[:SHOWN], *more])


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_others_see_the_same(name: str) -> None:
    before, now = (FILES / name).read_text(encoding="utf-8"), taken(name)
    if before != now:
        pytest.fail(difference(name, before, now), pytrace=False)


def test_there_is_no_snapshot_that_is_not_compared() -> None:
    assert {file.name for file in FILES.iterdir()} == set(SNAPSHOTS)


def test_a_difference_is_shown_by_the_lines_that_differ() -> None:
    text = difference("metrics.txt", "a\nb\nc\n", "a\nx\nc\n")
    assert text.splitlines()[1:] == ["-b", "+x"]
    many = difference("metrics.txt", "", "\n".join(map(str, range(100))))
    assert many.splitlines()[-1] == "… and 60 more lines"
