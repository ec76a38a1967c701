"""Checks the names and plain types of an operator's vLLM settings by vLLM's source: importing vLLM takes many seconds."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.workers.engine_source import parsed_source
from headrace.workers.plain_types import check_plain_types
from headrace.workers.vllm.embeddings.settings import check_encoders
from headrace.workers.vllm.settings import ADDED_ARGS, check_names

_SOURCE = Path("engine", "arg_utils.py")
_CLASSES = frozenset({"EngineArgs", "AsyncEngineArgs"})


def check_arguments(args: Mapping[str, Any]) -> None:
    """Raise EngineStartFailed for a setting that vLLM does not have or a value of another plain type.

    What cannot be said by the source alone passes: vLLM decides about it when it starts.
    """
    known = vllm_settings() if args else {}
    if not known:
        return
    check_names(args, [*known, *ADDED_ARGS])
    check_plain_types("vLLM", args, known)
    check_encoders(args)


def vllm_settings(package: Path | None = None) -> dict[str, str]:
    """Return name → annotation of the settings of the vLLM in the folder `package`, by default the one that is installed.

    Empty where there is none, or where its source is not as expected.
    """
    tree = parsed_source("vllm", _SOURCE, package)
    if tree is None:
        return {}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in _CLASSES]
    if {node.name for node in classes} != _CLASSES:
        return {}
    fields = [field for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return {field.target.id: ast.unparse(field.annotation) for field in fields if isinstance(field.target, ast.Name)}
