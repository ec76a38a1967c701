"""Names what embeddings of media depend on beside the item, so that no engine goes on from those of another model.

A folder may get other weights under the same path, and settings change what weights make of an item.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.workers.errors import EngineStartFailed

SAMPLE = 64 << 10
"""Bytes of each tensor that are read: training that changes a tensor changes some of its first numbers."""

_WEIGHTS = ".safetensors"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_TEXTS = (".json", ".py", ".model", ".txt", ".jinja")
_MOST_HEAD = 100 << 20

_WITHOUT_EFFECT = frozenset(
    {
        "adapters",
        "disable_log_stats",
        "enable_log_requests",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_events_config",
        "kv_transfer_config",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "reasoning_parser",
        "scheduling_policy",
    }
)
"""Settings that change nothing in an embedding; every other one is taken to."""


def settings_identity(args: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> str:
    """Return the engine settings that embeddings may depend on, as text."""
    kept = {name: value for name, value in args.items() if name not in _WITHOUT_EFFECT and name not in without}
    return json.dumps(kept, sort_keys=True, default=repr)


def model_files(model: str, revision: str | None) -> Path:
    """Return where the files of a model are: its own path, or a hub's snapshot on this machine. Raises EngineStartFailed."""
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str):
        raise EngineStartFailed(f"the files of {model} are not on this machine, so its embeddings cannot be told from others")
    return Path(config).parent


def model_identity(files: Path) -> str:
    """Return a digest of a model's files: texts whole, of each tensor its place and its beginning. Raises EngineStartFailed.

    `files`: a folder, or a single file. Of weights in other forms than safetensors the whole file is read.
    """
    digest = hashlib.sha256()
    weights = 0
    for path in sorted(path for path in files.iterdir() if path.is_file()) if files.is_dir() else [files]:
        name = path.name.encode()
        if path.suffix == _WEIGHTS:
            parts = _tensors(path)
        elif path.suffix in _OTHER_WEIGHTS + _TEXTS:
            parts = _whole(path)
        else:
            continue
        weights += path.suffix not in _TEXTS
        digest.update(b"%d %s %d " % (len(name), name, path.stat().st_size))
        for part in parts:
            digest.update(part)
    if not weights:
        raise EngineStartFailed(f"{files} has no weights, so embeddings of this model cannot be told from those of another")
    return digest.hexdigest()


def namespace(*parts: object) -> str:
    """Return a short digest of everything that embeddings depend on."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _whole(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            yield part


def _tensors(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_HEAD, path.stat().st_size):
            raise EngineStartFailed(f"{path} is no safetensors file: its head would have {length} bytes")
        head = file.read(length)
        yield head
        try:
            tensors = [entry["data_offsets"] for name, entry in sorted(json.loads(head).items()) if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineStartFailed(f"the head of {path} cannot be read: {error}") from error
        for start, end in tensors:
            file.seek(8 + length + start)
            yield file.read(min(SAMPLE, end - start))
