"""Checks the names and plain types of an operator's SGLang settings by SGLang's source: importing SGLang takes many seconds."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.workers.plain_types import check_plain_types
from headrace.workers.sglang.settings import check_names

_SOURCES = Path("srt", "arg_groups", "fields")  # a class in each file; `ServerArgs` has the fields of all of them
_ONE_OF_THEM = "page_size"


def check_arguments(args: Mapping[str, Any]) -> None:
    """Raise EngineStartFailed for a setting that SGLang does not have, or whose plain type the value is not.

    What cannot be said by the source alone passes: SGLang decides about it when it starts.
    """
    known = sglang_settings() if args else {}
    if known:
        check_names(args, known)
        check_plain_types("SGLang", args, known)


def sglang_settings(package: Path | None = None) -> dict[str, str]:
    """Return name → annotation of the settings of the SGLang in the folder `package`, by default the one that is installed.

    Empty where there is none, or where its source is not as expected.
    """
    if package is None:
        spec = find_spec("sglang")
        if spec is None or spec.origin is None:
            return {}
        package = Path(spec.origin).parent
    found: dict[str, str] = {}
    try:
        for file in (package / _SOURCES).glob("*.py"):
            for node in ast.parse(file.read_bytes()).body:
                if isinstance(node, ast.ClassDef):
                    found |= _fields(node)
    except (OSError, SyntaxError, ValueError):
        return {}
    return found if _ONE_OF_THEM in found else {}


def _fields(node: ast.ClassDef) -> dict[str, str]:
    fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
    return {field.target.id: _annotation(field.annotation) for field in fields if isinstance(field.target, ast.Name)}


def _annotation(node: ast.expr) -> str:
    """Return the type of `A[type, help]`, SGLang's own spelling of `Annotated`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and ast.unparse(node.value) in ("A", "Annotated"):
        node = node.slice.elts[0]
    return ast.unparse(node)
