"""Constructors take few arguments: the linter counts them, and no constructor takes more than one callback."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("jetstream", "broker", "router", "workers", "frontend", "headrace", "tools")


CLOCKS = frozenset({"clock", "wall"})  # sources of time, which call nothing back


def _callbacks(text: str) -> Iterator[tuple[str, int]]:
    """(class, number of callbacks) of each constructor."""
    if "Callable" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                given = [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]
                yield (
                    node.name,
                    sum("Callable" in ast.unparse(one.annotation) for one in given if one.annotation and one.arg not in CLOCKS),
                )


def test_no_constructor_takes_more_than_one_callback() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {name} takes {count} callbacks"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        for name, count in _callbacks(file.read_text())
        if count > 1
    ]
    assert not found, "\n".join(found)


def test_callbacks_are_counted() -> None:
    text = "class A:\n    def __init__(self, b: Callable[[], None], *, c: Callable[[], int] | None) -> None: ..."
    assert list(_callbacks(text)) == [("A", 2)]
