"""Says where a model comes from, and checks that against what the operator allows.

A model is a folder or file of the machine, an id of a hub (`org/name`), or an address (`s3://…`) whose scheme is its kind.  The
same holds for all else that an engine's settings name and that it loads: tokenizers, draft models, their configurations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.workers.adapter_files.source import allows
from headrace.workers.errors import ModelSourceRefused

KINDS = ("folder", "hf", "s3", "gs", "az", "https", "http")

_PLACE = re.compile(r"/.*|[a-z][a-z0-9+.-]*://.+", re.DOTALL)
_PATH_STARTS = ("/", "./", "../", "~")
# Names under which vLLM, SGLang and TensorRT-LLM take something to load, also inside of a map such as `speculative_config`.
_LOADED = frozenset(
    {
        "draft_model",
        "hf_config_path",
        "model",
        "model_path",
        "model_weights",
        "speculative_draft_model_path",
        "speculative_model",
        "speculative_model_dir",
        "tokenizer",
        "tokenizer_path",
    }
)
_METHODS = frozenset({"ngram", "[ngram]"})  # vLLM takes them as draft models and loads nothing


def check_rules(rules: Sequence[str]) -> None:
    """Raise ValueError naming the first rule that is neither a kind of source nor a place."""
    for rule in rules:
        if rule not in KINDS and not _PLACE.fullmatch(rule):
            raise ValueError(f"model_sources: {rule!r} is neither a kind ({', '.join(KINDS)}) nor a place (/models, hf://org)")


def check_model_source(model: str, rules: Sequence[str]) -> None:
    """Raise ModelSourceRefused for a model from elsewhere than the rules say."""
    kind, address = _source(model)
    if not any(allows(rule, kind, address) for rule in rules):
        allowed = ", ".join(rules) or "nothing"
        raise ModelSourceRefused(f"models from {address} are not allowed here; worker.model_sources allows: {allowed}")


def check_loaded_sources(args: Mapping[str, Any], rules: Sequence[str]) -> None:
    """Raise ModelSourceRefused for an engine's settings that would load something from elsewhere, and name the setting."""
    for name, place in _loaded(args):
        try:
            check_model_source(place, rules)
        except ModelSourceRefused as error:
            raise ModelSourceRefused(f"{name}: {error}") from None


def _source(model: str) -> tuple[str, str]:
    """Return the kind and the address of a model, as rules name them: without query, fragment and the file type of GGUF."""
    scheme, found, rest = model.partition("://")
    if found:
        path = re.split(r"[?#]", rest, maxsplit=1)[0]
        # an address that climbs is below no place
        return scheme.lower(), f"{scheme.lower()}://{'' if '..' in path.split('/') else path}"
    path = Path(model).expanduser()
    if model.startswith(_PATH_STARTS) or path.exists():
        return "folder", str(path.resolve())
    return "hf", f"hf://{model.partition(':')[0]}"


def _loaded(args: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    for name, value in args.items():
        if isinstance(value, Mapping):
            yield from _loaded(value, f"{within}{name}.")
        elif str(name).replace("-", "_") in _LOADED and isinstance(value, str) and value and value not in _METHODS:
            yield f"{within}{name}", value
