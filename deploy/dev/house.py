"""Counts what the tree consists of: lines, modules, imports, classes, tests, words, and the modules on the ways of a request.

python -m deploy.dev.house [REV] [--no-walks] [--modules]      REV: the working tree where it is left out
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from deploy.dev.bodies import module_name

PRODUCT = ("jetstream", "broker", "workers", "router", "frontend", "headrace")
SMALL = 60  # lines
WALKS = Path("tests/simulation/cost/walks.py")
_WALKS_S = 300.0


class Module:
    """A module of the product as it is counted."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.name, self.lines = path, module_name(path), text.count("\n")
        self.tree = ast.parse(text)
        nodes = list(ast.walk(self.tree))
        self.imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        self.classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self.import_lines = len({line for node in self.imports for line in _lines(node)})
        texts = {line for node in nodes if _is_docstring(node) for line in _lines(node)}
        blank = {at for at, line in enumerate(text.splitlines(), 1) if not line.strip() or line.lstrip().startswith("#")}
        self.code_lines = self.lines - len(texts | blank)

    def imported(self, modules: Iterable[str]) -> set[str]:
        """Return the modules of the product that this one imports."""
        found = set()
        for node in self.imports:
            if isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
                continue
            full = {one.name: f"{node.module}.{one.name}" for one in node.names}
            found |= {name if name in modules else node.module or "" for name in full.values()}
        return found.intersection(modules) - {self.name}


def _lines(node: Any) -> range:
    return range(node.lineno, node.end_lineno + 1)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0].rpartition(".")[2] == "Protocol" for base in node.bases)


def _has_one_public_method(node: ast.ClassDef) -> bool:
    """Return True for a class with a constructor and one public method."""
    names = [one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return "__init__" in names and len([name for name in names if not name.startswith("_")]) == 1


def files(root: Path, folders: Iterable[str], ending: str) -> Iterator[Path]:
    """Return the files below folders, without those that are reached by a link."""
    for folder in folders:
        for at, below, names in os.walk(root / folder):
            below[:] = sorted(name for name in below if not Path(at, name).is_symlink() and name != "__pycache__")
            yield from (Path(at, name) for name in sorted(names) if name.endswith(ending) and not Path(at, name).is_symlink())


def modules_of(root: Path, folders: Iterable[str]) -> list[Module]:
    """Return the modules of some folders. An empty `__init__` is none."""
    read = ((str(file.relative_to(root)), file.read_text()) for file in files(root, folders, ".py"))
    return [Module(path, text) for path, text in read if text.strip()]


def _length(file: Path) -> int:
    return file.read_text().count("\n")


def bars(root: Path) -> dict[str, str]:
    """Return each figure by what it counts."""
    modules = modules_of(root, (*PRODUCT, "tools"))
    product = [one for one in modules if not one.path.startswith("tools/")]
    compiled = sum(_length(file) for ending in (".pyx", ".pxd") for file in files(root, PRODUCT, ending))
    names = frozenset(one.name for one in modules)
    edges = {one.name: one.imported(names) for one in modules}
    importers = Counter(name for imported in edges.values() for name in imported)
    import_lines, code_lines = (sum(getattr(one, kind) for one in modules) for kind in ("import_lines", "code_lines"))
    classes = [node for one in modules for node in one.classes]
    return {
        "product lines": f"{sum(one.lines for one in product) + compiled:,}",
        "product lines with tools": f"{sum(one.lines for one in modules) + compiled:,}",
        "modules": f"{len(modules):,}",
        "folders with code": f"{len({Path(one.path).parent for one in modules}):,}",
        "import lines / code lines": f"{import_lines:,} / {code_lines:,} = {import_lines / code_lines:.1%}",
        "modules that one other imports": f"{sum(count == 1 for count in importers.values()):,}",
        f"modules under {SMALL} lines": f"{sum(one.lines < SMALL for one in modules):,}",
        "imports between modules": f"{sum(map(len, edges.values())):,}",
        "own Protocols": f"{sum(map(_is_protocol, classes)):,}",
        "classes with a constructor and one public method": f"{sum(map(_has_one_public_method, classes)):,}",
        "test lines": f"{sum(map(_length, files(root, ['tests'], '.py'))):,}",
        "words in docs/": f"{sum(len(file.read_text().split()) for file in files(root, ['docs'], '.md')):,}",
    }


def walks(root: Path, own: Path) -> dict[str, list[str]]:
    """Return the modules on each way through the system of a tree, counted by its own code, or else by that of our tree."""
    if not (root / WALKS).exists():
        (root / WALKS).write_text((own / WALKS).read_text())
    name = ".".join(WALKS.with_suffix("").parts)
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "0"}
    ran = subprocess.run(
        [sys.executable, "-m", name], cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=_WALKS_S
    )
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


def main(arguments: list[str]) -> int:
    """Print the figures of a tree."""
    parser = argparse.ArgumentParser(prog="house", description="Count what the tree consists of.")
    parser.add_argument("revision", metavar="REV", nargs="?", help="default: the working tree")
    parser.add_argument("--no-walks", action="store_true", help="leave out the ways of a request, which take half a minute")
    parser.add_argument("--modules", action="store_true", help="name the modules on each way")
    given = parser.parse_args(arguments)
    own = Path(
        subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, check=True, text=True).stdout.strip()
    )
    with tempfile.TemporaryDirectory() as folder:
        root = own
        if given.revision:
            root = Path(folder)
            packed = subprocess.run(["git", "archive", given.revision], cwd=own, capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(root, filter="tar")
        rows = bars(root)
        ways = {} if given.no_walks else walks(root, own)
    width = max(map(len, [*rows, *ways]))
    for name, figure in rows.items():
        print(f"{name:<{width}}  {figure}")
    for name, modules in ways.items():
        print(f"{name:<{width}}  {len(modules)} modules")
        if given.modules:
            print("".join(f"    {module}\n" for module in modules), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
