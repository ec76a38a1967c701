"""Checks an operator's settings of an engine by the engine's source, before the engine is imported.

Importing an engine takes seconds, and for some a GPU; its source only has to be parsed. What the source cannot decide passes:
the engine decides about it when it starts.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.workers.errors import EngineStartFailed

_PLAIN = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_OPTIONAL = re.compile(r"Optional\[(\w+)\]\Z")

Fields = Mapping[str, str]
"""Name → annotation of the settings of an engine."""


class EngineSettings:
    """The settings of one engine, and what it needs to be installed."""

    def __init__(
        self,
        engine: str,
        *,
        packages: tuple[str, ...],
        install: str,
        options: Mapping[str, str],
        added: Fields,
        read: Callable[[], Fields],
    ) -> None:
        """`engine`: its name in errors. `options`: settings that have an option of Headrace's own. `added`: those that the
        adapter adds. `read`: reads all others from the installed source; empty where there is none, or it is unlike expected.
        """
        self.engine = engine
        self.packages, self.install = packages, install
        self.options, self.added, self.read = options, added, read

    def check_packages(self, *modules: str) -> None:
        """Raise EngineStartFailed for the first of its packages, or of `modules`, that is not installed. Imports none."""
        for module in modules or self.packages:
            if find_spec(module) is None:
                raise EngineStartFailed(f"the Python package {module} is not installed; {self.install}")

    def check_names(self, args: Iterable[str], known: Iterable[str]) -> None:
        """Raise EngineStartFailed for the first setting not in `known`, naming what is spelt like it."""
        names = [*known, *self.added]
        for name in args:
            if name in self.options:
                raise EngineStartFailed(f"give {name!r} as {self.options[name]}, not as an engine setting")
            if name not in names:
                raise EngineStartFailed(f"{self.engine} has no setting {name!r}{spelt_like(name, names)}")

    def check_arguments(self, args: Mapping[str, Any]) -> None:
        """Raise EngineStartFailed for a setting that the engine does not have, or whose plain type the value is not."""
        if args and (known := self.read()):
            self.check_names(args, known)
            check_plain_types(self.engine, args, {**known, **self.added})


def spelt_like(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the known ones that are spelt like it, if there are any."""
    close = difflib.get_close_matches(name.replace("-", "_"), list(known), n=3, cutoff=0.6)
    return f"; close to it: {', '.join(close)}" if close else ""


def check_plain_types(engine: str, args: Mapping[str, Any], annotations: Fields) -> None:
    """Raise EngineStartFailed for the first value that is not of the plain type that its setting has.

    `engine` is the name in the error. Settings of other types, and without an annotation, pass.
    """
    for name, value in args.items():
        kinds = _kinds(annotations.get(name, ""))
        if kinds and kinds <= _PLAIN.keys() and not _fits(value, kinds):
            wanted = " or ".join(text for kind, text in _PLAIN.items() if kind in kinds)
            raise EngineStartFailed(f"{engine} takes {wanted} as {name}, not {value!r}")


def json_as_text(args: Mapping[str, Any], annotations: Fields) -> dict[str, Any]:
    """Return the settings with objects and lists written as JSON where the engine takes text and nothing else.

    An engine reads such a setting from its command line, as text; the value of `--engine-arg` was read as JSON before.
    """
    return {
        name: json.dumps(value) if isinstance(value, dict | list) and _kinds(annotations.get(name, "")) == {"str"} else value
        for name, value in args.items()
    }


def _kinds(annotation: str) -> set[str]:
    return {kind.strip() for kind in _OPTIONAL.sub(r"\1 | None", annotation).split("|")} - {"None"}


def _fits(value: Any, kinds: set[str]) -> bool:
    if value is None:
        return True
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int):
        return value in (0, 1) or bool(kinds & {"int", "float"})
    return isinstance(value, float) and ("float" in kinds or value.is_integer())


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def parsed(files: Iterable[Path]) -> list[ast.ClassDef]:
    """Return the classes of these source files; none if one of them cannot be read, or is not Python."""
    try:
        trees = [ast.parse(file.read_bytes()) for file in files]
    except (OSError, SyntaxError, ValueError):
        return []
    return [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]


def annotated(body: Iterable[ast.stmt]) -> dict[str, ast.expr]:
    """Return the annotated fields of a class's body, those of some versions or platforms (`if`) included."""
    found: dict[str, ast.expr] = {}
    for part in body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found[part.target.id] = part.annotation
        elif isinstance(part, ast.If):
            found |= annotated([*part.body, *part.orelse])
    return found
