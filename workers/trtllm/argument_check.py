"""Checks names and plain types of an operator's TensorRT-LLM settings by its source: importing it takes long and needs CUDA."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.workers.engine_source import parsed_source
from headrace.workers.errors import EngineStartFailed
from headrace.workers.plain_types import check_plain_types
from headrace.workers.trtllm.settings import OWN_ARGS, check_names

_SOURCE = Path("llmapi", "llm_args.py")
_SETTINGS = "TorchLlmArgs"
_MAPS = {"kv_cache_config": "KvCacheConfig", "cache_transceiver_config": "CacheTransceiverConfig"}  # given as maps
_BOUNDED = re.compile(r"\b(?:Positive|NonNegative|Strict)(Int|Float)\b")  # pydantic's names of numbers with bounds

Fields = dict[str, str]
"""Name → annotation of the fields of a class."""


def check_arguments(args: Mapping[str, Any]) -> None:
    """Raise EngineStartFailed for a setting that TensorRT-LLM does not have, or whose plain type the value is not.

    What cannot be said by the source alone passes: TensorRT-LLM decides about it when it starts.
    """
    classes = trtllm_settings() if args else {}
    if not classes:
        return
    given = {name: value for name, value in args.items() if name not in OWN_ARGS}
    check_names(given, frozenset(classes[_SETTINGS]))
    check_plain_types("TensorRT-LLM", given, classes[_SETTINGS])
    for name, of in _MAPS.items():
        fields, value = classes.get(of), given.get(name)
        if fields and isinstance(value, Mapping):
            _check_map(name, value, fields)


def _check_map(name: str, given: Mapping[str, Any], fields: Fields) -> None:
    for field in given:
        if field not in fields:
            close = difflib.get_close_matches(field.replace("-", "_"), fields, n=3, cutoff=0.6)
            hint = f"; close to it: {', '.join(close)}" if close else ""
            raise EngineStartFailed(f"{name} of TensorRT-LLM has no field {field!r}{hint}")
    check_plain_types(f"TensorRT-LLM's {name}", given, fields)


def trtllm_settings(package: Path | None = None) -> dict[str, Fields]:
    """Return the settings of the TensorRT-LLM in the folder `package`, by default the one that is installed, by class.

    Empty where there is none, or where its source is not as expected.
    """
    tree = parsed_source("tensorrt_llm", _SOURCE, package)
    if tree is None:
        return {}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {name: _fields(name, classes) for name in (_SETTINGS, *_MAPS.values())}
    return found if "max_batch_size" in found[_SETTINGS] else {}


def _fields(name: str, classes: Mapping[str, ast.ClassDef]) -> Fields:
    """Return the fields of a class and of its bases, as far as the same file has them."""
    node = classes.get(name)
    if node is None:
        return {}
    fields: Fields = {}
    others = {other: one for other, one in classes.items() if other != name}  # no class is its own base
    for base in node.bases:
        fields |= _fields(ast.unparse(base), others)
    for field in _annotated(node.body):
        annotation = ast.unparse(field.annotation)
        if isinstance(field.target, ast.Name) and not annotation.startswith("ClassVar"):
            fields[field.target.id] = _BOUNDED.sub(lambda match: match[1].lower(), annotation)
    return fields


def _annotated(body: Iterable[ast.stmt]) -> Iterator[ast.AnnAssign]:
    for part in body:
        if isinstance(part, ast.AnnAssign):
            yield part
        elif isinstance(part, ast.If):  # fields of some versions or platforms
            yield from _annotated([*part.body, *part.orelse])
