"""Log lines name a request by the same fields in every process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("broker", "frontend", "router", "workers")
LEVELS = {"debug", "info", "warning", "error", "exception"}
OTHER_NAMES = {"id", "request", "req", "job_id"}


def log_calls(source: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=level)) if level in LEVELS:
                yield node


def wrong(source: str) -> list[int]:
    """Lines of log calls that name a request otherwise, or a job (the engines' id of a try) without its request."""
    found = []
    for call in log_calls(source):
        names = {keyword.arg for keyword in call.keywords}
        if names & OTHER_NAMES or ("job" in names and not names & {"request_id", None}):
            found.append(call.lineno)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_request_is_named_by_request_id(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(file.relative_to(ROOT)): lines for file in files if (lines := wrong(file.read_text()))} == {}


def test_other_names_are_found_and_the_right_ones_are_not() -> None:
    assert wrong('log.info("a.b", request=1)\nlog.info("a.b", job=1)\nlog.info("a.b", id=1)') == [1, 2, 3]
    assert wrong('log.info("a.b", request_id=1, job=2)\nlog.info("a.b", **ids, job=2)\nother.info(id=1)') == []
