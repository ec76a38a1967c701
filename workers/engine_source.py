"""Reads a source file of an installed engine without importing it: that would take seconds, and for some a GPU."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def parsed_source(name: str, file: Path, folder: Path | None = None) -> ast.Module | None:
    """Parse `file` of the package in `folder`, by default of the installed package `name`.

    Return None where there is no such package or file, or it is not Python.
    """
    if folder is None:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    try:
        return ast.parse((folder / file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
