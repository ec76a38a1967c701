"""Every module, file and test that code and documents name in backticks exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("jetstream", "broker", "router", "workers", "frontend", "tools")  # each is `headrace.<folder>` when imported
SEARCHED = (*FOLDERS, "headrace", "tests", "benchmarks", "docs")
LEFT_OUT = {"CHANGELOG.md", "test_module_paths.py"}  # history, and the examples below

DOTTED = re.compile(r"(?<![\w./-])((?:headrace|tests|benchmarks)(?:\.[A-Za-z_]\w*)+)")
COMMAND = re.compile(r"-m ((?:headrace|tests|benchmarks|" + "|".join(FOLDERS) + r")(?:\.\w+)+)")
PATH = re.compile(r"(?<![\w./-])((?:" + "|".join((*FOLDERS, "headrace", "tests", "benchmarks", "docs")) + r")/[\w./*-]*[\w/*])")
TICKS = re.compile(r"`([^`\n]+)`")
NOT_MODULES = {"headrace.toml", "headrace.apis", "headrace.parts"}  # a file of users, and groups of entry points


def _texts() -> Iterator[tuple[str, str]]:
    """(file, text) of each document, and of the strings and comments of each module, as one text."""
    for name in SEARCHED:
        for file in sorted((ROOT / name).rglob("*.py")):
            if file.is_symlink() or any(parent.is_symlink() for parent in file.relative_to(ROOT).parents if parent != Path()):
                continue
            if file.name not in LEFT_OUT:
                yield str(file.relative_to(ROOT)), file.read_text()
    for file in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        if file.name not in LEFT_OUT:
            yield str(file.relative_to(ROOT)), file.read_text()


def _module_file(dotted: str) -> Path | None:
    """The file or folder of a module, given as it is imported."""
    parts = dotted.split(".")
    if parts[0] == "headrace" and len(parts) > 1 and parts[1] in FOLDERS:
        parts = parts[1:]
    base = ROOT.joinpath(*parts)
    for file in (base.with_suffix(".py"), base.with_suffix(".pyx"), base.with_suffix(".pyi"), base):
        if file.exists():
            return file
    return None


@cache
def _names(file: Path) -> frozenset[str]:
    """What a module defines, imports or declares, in classes and functions too."""
    if file.is_dir():
        file = file / "__init__.py"
        if not file.exists():
            return frozenset()
    if file.suffix == ".pyx":
        return frozenset(re.findall(r"\w+", file.read_text()))
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias():
                found.add(node.asname or node.name)
            case _:
                pass
    return frozenset(found)


def missing(dotted: str) -> str | None:
    """What of a dotted name does not exist, or None."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        file = _module_file(".".join(parts[:length]))
        if file is not None and (length > 1 or len(parts) == 1):
            rest = parts[length:]
            if not rest:
                return None
            names = _names(file)
            return (
                None if all(name in names for name in rest) else f"{dotted}: {file.relative_to(ROOT)} has no {'.'.join(rest)}"
            )
    return f"{dotted}: there is no such module"


def _problems(text: str) -> Iterator[str]:
    for ticked in TICKS.findall(text):
        for dotted in DOTTED.findall(ticked):
            if dotted not in NOT_MODULES and (problem := missing(dotted)):
                yield problem
    for dotted in COMMAND.findall(text):
        if problem := missing(dotted):
            yield problem
    for ticked in TICKS.findall(text):
        for path in PATH.findall(ticked):
            if not (list(ROOT.glob(path)) if "*" in path else (ROOT / path.rstrip("/")).exists()):
                yield f"{path}: there is no such file"


def test_every_module_and_file_that_is_named_exists() -> None:
    problems = [f"{file}: {problem}" for file, text in _texts() for problem in _problems(text)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "text",
    [
        "`headrace.broker.nothing`",
        "`headrace.broker.codec.nothing`",
        "`broker/nothing.py`",
        "`tests/unit/nothing/`",
        "-m benchmarks.nothing",
    ],
)
def test_what_does_not_exist_is_found(text: str) -> None:
    assert list(_problems(text))


@pytest.mark.parametrize(
    "text",
    [
        "`headrace.broker.codec.encode`",
        "`broker/codec.py`",
        "`tests/unit/`",
        "-m benchmarks.serving",
        "`headrace up`",
        "`router.window`",
    ],
)
def test_what_exists_is_not_complained_about(text: str) -> None:
    assert not list(_problems(text))
