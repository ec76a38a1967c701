"""Names what embeddings of media depend on beside the item, so that no engine goes on from those of another model.

A folder may get other weights under the same path, and settings change what weights make of an item.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed

SAMPLE = 64 << 10
"""Bytes of each tensor that are read: training that changes a tensor changes some of its first numbers."""

_WEIGHTS = ".safetensors"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_TEXTS = (".json", ".py", ".model", ".txt", ".jinja")
_MOST_HEAD = 100 << 20

_NOT_IN_IDENTITY = frozenset({
    "adapters", "disable_log_stats", "enable_log_requests", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "kv_events_config", "kv_transfer_config", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override",
    "reasoning_parser", "scheduling_policy",
})  # fmt: skip
"""Settings that change nothing in an embedding; every other one is taken to."""


def settings_identity(args: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> str:
    """Return the engine settings that embeddings may depend on, as text."""
    kept = {name: value for name, value in args.items() if name not in _NOT_IN_IDENTITY and name not in without}
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


# Decides whether an engine hands embeddings of media over, and in which direction. Needs no vLLM.

ENCODERS_ARG = "encoders"
"""Whether a serving worker takes embeddings from encode workers."""

FOLDER = "folder"
MODULE = "headrace.workers.vllm.embeddings_connector"
CONNECTOR = "EmbeddingConnector"

_NODES = ("nnodes", "node_rank")
_OTHERS_ROLE = ("kv_transfer_config", "kv_transfer_mode", "enable_lora", "adapters", "kv_offloading_size")
"""Settings that an engine without a KV cache has no use for."""

_WITHOUT_EFFECT = (
    ENCODERS_ARG, "kv_transfer_mode", "block_size", "dtype", "enable_lora", "enable_prefix_caching", "enforce_eager",
    "limit_mm_per_prompt", "max_loras", "max_lora_rank", "max_model_len", "mm_processor_cache_gb",
    "prefix_caching_hash_algo", "seed", "tensor_parallel_size",
)  # fmt: skip
"""Settings in which an encode worker may differ from those that it encodes for: they change nothing in embeddings, or stand in
the word as they turned out (`dtype`)."""


def hands_over_embeddings(config: EngineConfig) -> bool:
    """Return whether the engine needs the connector. Raises EngineStartFailed for settings that contradict each other."""
    given = config.args.get(ENCODERS_ARG)
    if given not in (None, True, False):
        raise EngineStartFailed(f"{ENCODERS_ARG} is true or false, not {given!r}")
    encodes = config.role is Role.ENCODE
    if encodes and given is not None:
        raise EngineStartFailed(f"{ENCODERS_ARG} is for workers that serve; one of the role 'encode' is an encoder")
    if not encodes and not given:
        return False
    if config.args.get("ec_transfer_config") is not None:
        raise EngineStartFailed(f"{ENCODERS_ARG}, or the role 'encode', and ec_transfer_config both choose vLLM's connector")
    if any(int(config.args.get(name) or 0) > (name == "nnodes") for name in _NODES):
        raise EngineStartFailed("embeddings are not handed over by an engine on several machines")
    if encodes:
        for name in _OTHERS_ROLE:
            if config.args.get(name) not in (None, False):
                raise EngineStartFailed(f"an encode worker has no KV cache and no language model: it takes no {name}")
    return True


def transfer_config(role: Role, folder: Path) -> dict[str, Any]:
    """Build vLLM's `ec_transfer_config`. `folder`: where the worker and the core pass items."""
    return {
        "ec_connector": CONNECTOR,
        "ec_connector_module_path": MODULE,
        "ec_role": "ec_producer" if role is Role.ENCODE else "ec_consumer",
        "ec_connector_extra_config": {FOLDER: str(folder)},
    }


def encoder_word(config: EngineConfig, *, version: str, dtype: str, device: str) -> str:
    """Return a word that is equal for engines that make the same of an item. Raises EngineStartFailed.

    It depends on the model's files, vLLM, the kind of device, and every setting that is not known to have no effect.
    """
    files = model_identity(model_files(config.model, config.args.get("revision")))
    settings = settings_identity(config.args, without=_WITHOUT_EFFECT)
    return f"vllm/{version}/{device}/{dtype}/{namespace(files, settings)}"


# The folder through which a worker and the core of its vLLM pass embeddings: one file per item, there while it is needed.
#
# The worker of a serving engine puts a file there before vLLM gets the request, and removes it when no request needs it; the
# core reads it when it would run the encoder. In an encode worker it is the core that writes and the worker that takes.

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


class ItemFolder:
    """The core's view of the folder. Names that no item has been given are absent, whatever they are."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes | None:
        """Return the record of an item, or None if it is not there."""
        if not _NAME.fullmatch(name):
            return None
        try:
            return (self.path / name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, record: bytes) -> None:
        """Write the record of an item, whole or not at all. Raises OSError."""
        if not _NAME.fullmatch(name):
            raise OSError(f"{name!r} is no name of an item")
        part = self.path / f".{name}.{os.getpid()}"
        part.write_bytes(record)
        part.replace(self.path / name)

    def remove(self, name: str) -> None:
        """Remove an item; an absent one is fine."""
        if _NAME.fullmatch(name):
            (self.path / name).unlink(missing_ok=True)


class LentItems:
    """The worker's side of the folder: which sequence needs which files. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        self.folder = ItemFolder(path)
        self._of: dict[str, list[str]] = {}
        self._users: Counter[str] = Counter()

    def lend(self, sequence_id: str, records: Mapping[str, bytes]) -> None:
        """Put the records of items there, by name, until the sequence has ended. Raises OSError; then none of them is lent."""
        written = []
        try:
            for name, record in records.items():
                if not self._users[name]:
                    self.folder.write(name, record)
                written.append(name)
                self._users[name] += 1
        except OSError:
            self._of[sequence_id] = written
            self.end(sequence_id)
            raise
        self._of[sequence_id] = written

    def end(self, sequence_id: str) -> None:
        """Remove what no other sequence needs. Does nothing for a sequence without items."""
        for name in self._of.pop(sequence_id, ()):
            self._users[name] -= 1
            if self._users[name] <= 0:
                del self._users[name]
                self.folder.remove(name)

    def take(self, name: str) -> bytes | None:
        """Return what the core has written under this name, and remove it; None if it has not."""
        record = self.folder.read(name)
        self.folder.remove(name)
        return record


# The form in which the embeddings of a media item leave an engine: a head that says what they are, then the numbers.
#
# Record: `HREM`, version (u8), length of the name of the type of the numbers (u8), 2 zero bytes, rows and width (u32 little
# endian), the name, the numbers row by row as the engine's memory has them.

_HEAD = struct.Struct("<4sBBxxII")
_MAGIC = b"HREM"
_VERSION = 1
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

MOST_BYTES = 256 << 20
"""The most bytes of one item that are taken; 16,000 rows of 8,192 numbers of 16 bits."""

Bytes = bytes | bytearray | memoryview


class UnusableEmbeddings(Exception):
    """Bytes are not the embeddings of an item."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A row of `width` numbers of the type `dtype` for each token of an item."""

    rows: int
    width: int
    dtype: str
    data: Bytes


def pack(embeddings: Embeddings) -> bytes:
    """Return the record. Raises UnusableEmbeddings for a type of numbers that no record has, or a wrong number of bytes."""
    _check(embeddings)
    name = embeddings.dtype.encode()
    head = _HEAD.pack(_MAGIC, _VERSION, len(name), embeddings.rows, embeddings.width)
    return b"".join((head, name, embeddings.data))


def unpack(record: Bytes) -> Embeddings:
    """Return the embeddings of a record. Raises UnusableEmbeddings."""
    view = memoryview(record)
    if len(view) < _HEAD.size:
        raise UnusableEmbeddings(f"a record of {len(view)} bytes has no head")
    magic, version, length, rows, width = _HEAD.unpack_from(view)
    if (magic, version) != (_MAGIC, _VERSION):
        raise UnusableEmbeddings(f"the record begins with {magic!r}, version {version}")
    begin = _HEAD.size + length
    embeddings = Embeddings(rows, width, bytes(view[_HEAD.size : begin]).decode("latin-1"), view[begin:])
    _check(embeddings)
    return embeddings


def _check(embeddings: Embeddings) -> None:
    size = _ITEM_BYTES.get(embeddings.dtype)
    if size is None:
        raise UnusableEmbeddings(f"numbers of the type {embeddings.dtype!r}; known: {', '.join(_ITEM_BYTES)}")
    wanted = embeddings.rows * embeddings.width * size
    if not 0 < wanted <= MOST_BYTES or len(embeddings.data) != wanted:
        raise UnusableEmbeddings(
            f"{len(embeddings.data)} bytes for {embeddings.rows} rows of {embeddings.width} numbers, of 1 to {MOST_BYTES}"
        )
