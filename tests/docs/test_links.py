"""Links between documents lead to files and headings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

LINK = re.compile(r"(?<!!)\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def _documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(markdown: str) -> set[str]:
    """The anchors that the repository host makes of headings."""
    headings = HEADING.findall(FENCED.sub("", markdown))
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def _problems(file: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        if not there.exists():
            yield f"{file.name}: {target}: there is no such file"
        elif anchor and there.suffix == ".md" and anchor not in anchors(text if there == file else there.read_text()):
            yield f"{file.name}: {target}: there is no such heading"


def test_every_link_leads_somewhere() -> None:
    problems = [problem for file in _documents() for problem in _problems(file, file.read_text())]
    assert not problems, "\n".join(problems)


def test_every_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {file.name for file in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(LINK.findall(index)), "name it in docs/index.md"


@pytest.mark.parametrize("target", ["nothing.md", "operations.md#nothing", "#nothing"])
def test_a_link_into_nothing_is_found(target: str) -> None:
    assert list(_problems(ROOT / "docs" / "http.md", f"# HTTP\n[x]({target})"))


@pytest.mark.parametrize("target", ["operations.md#exit-codes", "../LICENSE", "#http", "https://example.org/x"])
def test_a_link_that_leads_somewhere_is_fine(target: str) -> None:
    assert not list(_problems(ROOT / "docs" / "http.md", f"# HTTP\n[x]({target})"))
