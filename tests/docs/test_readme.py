"""The README's picture is a recording of this demo, and the page for a package index stands without the repository."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import xml.etree.ElementTree as ET
from types import ModuleType

import pytest

from headrace.demo import ANSWER, WIDTH
from tests.docs.blocks import ROOT

IMAGE = ROOT / "docs" / "images" / "demo.svg"
TARGET = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_demo", IMAGE.parent / "record_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314  # drawn by us


def test_the_picture_shows_the_answer_of_the_demo_and_its_outcome() -> None:
    assert "docs/images/demo.svg" in (ROOT / "README.md").read_text()
    shown = " ".join(" ".join(texts(IMAGE.read_text())).split())
    words = [word for word in ANSWER.split() if word not in shown]
    assert not words
    assert "kill -9" in shown
    assert "no token lost, none twice" in shown
    assert "BROKEN" not in shown


def test_pieces_appear_where_and_when_they_were_written(recorder: ModuleType) -> None:
    found = recorder.spans([(0.0, "one\r\n\x1b[31mt"), (0.01, "wo"), (9.0, " three\x1b[0m\r\n\r\nfour")])
    assert [tuple(span) for span in found] == [
        (0.0, 0, 0, "one", ""),
        (0.0, 1, 0, "two", "31"),
        (0.01 + recorder.LONGEST_S, 1, 3, " three", "31"),
        (0.01 + recorder.LONGEST_S, 3, 0, "four", ""),
    ]
    assert texts(recorder.svg(found, "a < b")) == ["one", "two", "three", "four"]


def test_spaces_keep_their_width(recorder: ModuleType) -> None:
    assert texts(recorder.svg(recorder.spans([(0.0, "  a   b ")]), "")) == ["a\u00a0\u00a0\u00a0b"]


def test_a_character_that_is_cut_in_the_middle_waits_for_its_rest(recorder: ModuleType) -> None:
    whole = "a → b\x1b[31mc".encode()
    for cut in range(len(whole)):
        done, rest = recorder._split(whole[:cut])
        assert done + rest == whole[:cut]
        done.decode()
    assert recorder._split(whole) == (whole, b"")


def test_the_picture_is_wide_enough(recorder: ModuleType) -> None:
    assert recorder.COLUMNS >= WIDTH


def test_the_page_of_a_package_index_has_no_relative_links() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / project["readme"]).read_text()
    assert [target for target in TARGET.findall(page) if not target.startswith("https://")] == []
    assert TARGET.findall("[a](b.md) ![c](d.svg)") == ["b.md", "d.svg"]
