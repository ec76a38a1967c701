"""How the parts of the job protocol are constructed: few arguments, one callback, no part that knows the session."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "broker"
FOLDERS = ("worker", "protocol", "prefill")
MOST_ARGUMENTS = 7  # besides self, keyword-only ones included
MOST_CALLBACKS = 1


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            yield f"{folder}/{path.name}", ast.parse(path.read_text())


def constructors(tree: ast.Module) -> Iterator[tuple[str, list[ast.arg]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    yield node.name, [*item.args.posonlyargs, *item.args.args[1:], *item.args.kwonlyargs]


def faults(name: str, tree: ast.Module) -> list[str]:
    found = []
    for cls, arguments in constructors(tree):
        callbacks = [arg.arg for arg in arguments if arg.annotation and "Callable" in ast.unparse(arg.annotation)]
        if len(arguments) > MOST_ARGUMENTS:
            found.append(f"{name} {cls} takes {len(arguments)} arguments")
        if len(callbacks) > MOST_CALLBACKS:
            found.append(f"{name} {cls} takes the callbacks {callbacks}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "_session":
            found.append(f"{name}:{node.lineno} reaches back into the session")
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
            found.append(f"{name}:{node.lineno} hides an import")
        if isinstance(node, ast.BinOp) and ast.unparse(node) == "asyncio.TaskGroup | None":
            found.append(f"{name}:{node.lineno} has tasks that must be set before")
    return found


def test_the_parts_are_constructed_as_they_should_be() -> None:
    assert [fault for name, tree in modules() for fault in faults(name, tree)] == []


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self, a, b, c, d, *, e, f, g, h): ...",
        "class A:\n    def __init__(self, a: Callable[[], None], b: Callable[[], bool] | None): ...",
        "class A:\n    def __init__(self, session):\n        self._session = session",
        "if TYPE_CHECKING:\n    import session",
        "class A:\n    tasks: asyncio.TaskGroup | None = None",
    ],
)
def test_a_part_that_is_not_would_be_found(source: str) -> None:
    assert len(faults("a", ast.parse(source))) == 1


def test_the_session_only_constructs_wires_and_runs() -> None:
    (init,) = [
        item
        for node in ast.walk(ast.parse((ROOT / "worker" / "session.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        for item in [node]
    ]
    assert init.end_lineno is not None
    assert init.end_lineno - init.lineno + 1 <= 40


def test_only_the_session_itself_is_imported_by_no_part() -> None:
    importing = [
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "headrace.broker.worker.session"
    ]
    assert importing == []


def imports(tree: ast.Module) -> set[str]:
    return {
        node.module.removeprefix("headrace.broker.").replace(".", "/") + ".py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headrace.broker.")
    }


def test_no_module_imports_itself_by_way_of_others() -> None:
    needs = {name: imports(tree) for name, tree in modules()}
    left = dict(needs)
    while ready := [name for name, wanted in left.items() if not wanted & left.keys()]:
        for name in ready:
            del left[name]
    assert left == {}
