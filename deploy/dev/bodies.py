"""Proves that a merge of modules moved code and changed none of it.

    python -m deploy.dev.bodies REV_A [REV_B] [--renames FILE]      REV_B: the working tree where it is left out

Every function, class and other statement at the top of a module must have an equal in the other revision, wherever it lies
there.  Names are compared as if there were no modules: `pools.drain(x)` with `pools` imported equals `drain(x)`.  Imports,
docstrings, `__all__` and `TYPE_CHECKING` blocks are left out, and equal copies may become one.

FILE has a line `path/of/module.py:old=new` for each name that had to change because two modules had it.  `rename` may stand
before it and other lines are skipped, so that the plan of a merge can be given.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRODUCT = ("jetstream", "broker", "workers", "router", "frontend", "headrace", "tools")
RENAME = re.compile(r"^\s*(?:rename\s+)?([\w/]+\.py):(\w+)=(\w+)\s*$")
_DIFFERENCE = 20  # lines of it that are shown of one name

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Renames = Mapping[str, Mapping[str, str]]  # module → old name → new name


def sources(root: Path, revision: str | None) -> dict[str, str]:
    """Return path → text of the product's modules in a revision, or in the working tree."""
    if revision is None:
        listed = _git(root, "ls-files", "-co", "--exclude-standard", "--", *PRODUCT).splitlines()
        files = [Path(root, name) for name in listed if name.endswith(".py")]
        return {str(file.relative_to(root)): file.read_text() for file in files if file.is_file() and not file.is_symlink()}
    names = [
        name
        for name in _git(root, "ls-tree", "-r", "--name-only", revision, "--", *PRODUCT).splitlines()
        if name.endswith(".py")
    ]
    asked = "".join(f"{revision}:{name}\n" for name in names).encode()
    answer = subprocess.run(["git", "cat-file", "--batch"], cwd=root, input=asked, capture_output=True, check=True).stdout
    found = {}
    for name in names:
        head, _, answer = answer.partition(b"\n")
        size = int(head.split()[2])
        found[name], answer = answer[:size].decode(), answer[size + 1 :]
    return found


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True, text=True).stdout


def module_name(path: str) -> str:
    """Return the name by which a file is imported."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "headrace" else ["headrace", *parts])


def read_renames(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the renames of a file by module."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for line in lines:
        if match := RENAME.match(line):
            found[module_name(match[1])][match[2]] = match[3]
    return found


@dataclass(frozen=True, slots=True)
class Imported:
    """The origin of an imported name: `name` of `module`, or the module itself."""

    module: str
    name: str | None = None


def imports(tree: ast.AST, modules: Iterable[str]) -> dict[str, Imported]:
    """Return what each name stands for that a module imports, anywhere in it."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name.partition(".")[0]] = Imported(
                    one.name if one.asname else one.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                full = f"{node.module}.{one.name}"
                found[one.asname or one.name] = Imported(full) if full in modules else Imported(node.module or "", one.name)
    return found


def _bound(body: Iterable[ast.AST]) -> Iterator[str]:
    """Return the names that statements bind in their own scope, without those that imports bind."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        for field in ("name", "rest"):  # of an except clause, or of a pattern
            if not isinstance(node, ast.alias) and isinstance(name := getattr(node, field, None), str):
                yield name
        yield from _bound(ast.iter_child_nodes(node))


class Normalised(ast.NodeTransformer):
    """Writes the code of a module as if all modules were one."""

    def __init__(self, module: str, tree: ast.Module, modules: frozenset[str], renames: Renames) -> None:
        self._module, self._modules, self._renames = module, modules, renames
        self._imports = imports(tree, modules)
        self._shadows: list[set[str]] = []  # of the functions around a node, and of the class whose body it is in
        self._top = set(_bound(tree.body))

    def name(self, module: str, name: str) -> str:
        """Return a name at the top of a module as it is written everywhere."""
        if module.partition(".")[0] == "headrace":
            return self._renames.get(module, {}).get(name, name)
        return f"{module}.{name}"

    def visit_Name(self, node: ast.Name) -> ast.AST:
        origin = self._origin(node)
        if origin is not None:
            return ast.Name(self._whole(origin), node.ctx)
        if node.id in self._top and not self._is_shadowed(node.id):
            return ast.Name(self.name(self._module, node.id), node.ctx)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        origin = self._origin(node)
        return self.generic_visit(node) if origin is None else ast.Name(self._whole(origin), node.ctx)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        return ast.Global([self.name(self._module, name) for name in node.names])

    def visit_Constant(self, node: ast.Constant) -> Any:
        if not isinstance(node.value, str) or "headrace." not in node.value:
            return node
        return ast.Constant(re.sub(r"\bheadrace(?:\.\w+)+", self._without_module, node.value))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        for field in ("bases", "keywords", "decorator_list"):
            setattr(node, field, [self.visit(one) for one in getattr(node, field)])
        self._shadows.append(set(_bound(node.body)))
        body = [self._shadow_free(one) if isinstance(one, Function) else self.visit(one) for one in node.body]
        self._shadows.pop()
        node.body = _statements(body)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, field, None), list) and (block or field == "body"):
                setattr(node, field, _statements(block) if field == "body" else _kept(block))
        return node

    def _shadow_free(self, node: Function) -> Any:
        """Normalise a method, in which the names of its class are not in scope."""
        of_class = self._shadows.pop()
        made = self._function(node)
        self._shadows.append(of_class)
        return made

    def _function(self, node: Function) -> Any:
        if not isinstance(node, ast.Lambda):
            node.decorator_list = [self.visit(one) for one in node.decorator_list]
            node.returns = self.visit(node.returns) if node.returns else None
        node.args = self.visit(node.args)
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        body = node.body if isinstance(node.body, list) else [node.body]
        shared = {name for one in ast.walk(node) if isinstance(one, ast.Global) for name in one.names}
        self._shadows.append(({one.arg for one in given if one} | set(_bound(body))) - shared)
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
        else:
            node.body = _statements([self.visit(one) for one in node.body])
        self._shadows.pop()
        return node

    def _is_shadowed(self, name: str) -> bool:
        return any(name in shadow for shadow in self._shadows)

    def _origin(self, node: ast.expr) -> Imported | None:
        """Return what an expression stands for if it is an imported name, or one of an imported module."""
        if isinstance(node, ast.Name):
            return None if self._is_shadowed(node.id) else self._imports.get(node.id)
        if isinstance(node, ast.Attribute):
            of = self._origin(node.value)
            if of is not None and of.name is None:
                full = f"{of.module}.{node.attr}"
                return Imported(full) if full in self._modules else Imported(of.module, node.attr)
        return None

    def _whole(self, origin: Imported) -> str:
        if origin.name is None:
            return "a module" if origin.module in self._modules else origin.module
        return self.name(origin.module, origin.name)

    def _without_module(self, match: re.Match[str]) -> str:
        parts = match[0].split(".")
        known = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self._modules), 0)
        return ".".join(["headrace", *parts[known:]]) if known else match[0]


def _kept(block: list[ast.stmt]) -> list[ast.stmt]:
    def is_text(node: ast.stmt) -> bool:
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)

    return [node for node in block if not isinstance(node, ast.Import | ast.ImportFrom) and not is_text(node)]


def _statements(block: list[ast.stmt]) -> list[ast.stmt]:
    return _kept(block) or [ast.Pass()]


@dataclass(frozen=True, slots=True)
class Piece:
    """A function, class or statement at the top of a module, normalised."""

    name: str
    path: str
    text: str
    dump: str


def pieces(files: Mapping[str, str], without: Collection[str], renames: Renames) -> Iterator[Piece]:
    """Return all that stands at the top of modules, but for imports and docstrings, and for the files of `without`."""
    modules = frozenset(module_name(path) for path in files)
    for path, text in files.items():
        if path in without:
            continue
        tree = ast.parse(text)
        module = module_name(path)
        normalised = Normalised(module, tree, modules, renames)
        for node in _kept(list(tree.body)):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            made = normalised.visit(node)
            name = ast.unparse(made).partition("\n")[0][:100]
            if isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = made.name = normalised.name(module, made.name)
            if not name.startswith("__all__"):
                yield Piece(name, path, ast.unparse(ast.fix_missing_locations(made)), ast.dump(made))


def compare(before: Mapping[str, str], after: Mapping[str, str], renames: Renames) -> tuple[list[str], list[str]]:
    """Return the differences, and the copies that have become fewer."""
    same = {path for path in before.keys() & after.keys() if before[path] == after[path]}
    old, new = _read(before, same, renames), _read(after, same, {})
    if differing := old.keys() ^ new.keys():
        rest = _read(before, before.keys() - same, renames)
        for known in (old, new):
            known |= {text: known.get(text, []) + rest[text] for text in differing if text in rest}
    gone = sorted((old[text][0] for text in old if text not in new), key=lambda one: (one.path, one.name))
    come = [new[text][0] for text in new if text not in old]
    found = []
    for one in gone:
        others = sorted((other for other in come if other.name == one.name), key=lambda other: other.path != one.path)
        if others:
            come.remove(others[0])
            texts = one.text.splitlines(), others[0].text.splitlines()
            lines = difflib.unified_diff(*texts, one.path, others[0].path, n=1, lineterm="")
            found.append("\n".join([f"changed: {one.name}", *list(lines)[:_DIFFERENCE]]))
        else:
            found.append(f"gone: {one.name} ({one.path})")
    found += sorted(f"new: {one.name} ({one.path})" for one in come)
    counts = {text: (len(old[text]), len(new[text])) for text in old if text in new}
    found += sorted(f"copied: {new[text][0].name}, {were} → {are}" for text, (were, are) in counts.items() if are > were)
    return found, sorted(f"{old[text][0].name}: {were} → {are}" for text, (were, are) in counts.items() if are < were)


def _read(files: Mapping[str, str], without: Collection[str], renames: Renames) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = defaultdict(list)
    for one in pieces(files, without, renames):
        found[one.dump].append(one)
    return dict(found)


def main(arguments: list[str]) -> int:
    """Compare two revisions. Returns 1 if they differ."""
    parser = argparse.ArgumentParser(prog="bodies", description="Prove that code was moved and not changed.")
    parser.add_argument("before", metavar="REV_A")
    parser.add_argument("after", metavar="REV_B", nargs="?", help="default: the working tree")
    parser.add_argument("--renames", type=Path, help="lines path/of/module.py:old=new")
    given = parser.parse_args(arguments)
    root = Path(_git(Path(), "rev-parse", "--show-toplevel").strip())
    renames = read_renames(given.renames.read_text().splitlines()) if given.renames else {}
    found, copies = compare(sources(root, given.before), sources(root, given.after), renames)
    print("\n".join([*found, *(f"equal copies became fewer: {text}" for text in copies)]))
    print(f"{len(found)} differences" if found else "equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
