"""Finds the folder with a model's `tokenizer.json`, by which frontends tokenise, or writes that file for a model without one.

Models with a vocabulary of another kind (`vocab.json` with `merges.txt`, of tiktoken, of sentencepiece) have no such file.
Their engine's own tokenizer is then most often one of the same library, which transformers has built from that vocabulary. It
is written as it is, so the engine and all frontends have the same ids.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from headrace.workers.errors import EngineStartFailed

log = structlog.get_logger(__name__)

FILE = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.*", "additional_chat_templates/*.jinja")


def tokenizer_folder(
    name: str, revision: str | None, own: Callable[[], Any], *, environ: Mapping[str, str] = os.environ
) -> Path:
    """Return the folder with the tokenizer of a model. `name` is a folder, or an id of a hub whose files are here.

    `own` gives the engine's tokenizer. What is written lies in the user's cache, under a name that follows from the content.
    Raises EngineStartFailed if the model has no file and that cannot be written as one.
    """
    folder = Path(name) if Path(name).is_dir() else _cached(name, revision)
    if folder is not None and (folder / FILE).is_file():
        return folder
    tokenizer = own()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise EngineStartFailed(
            f"{name} has no {FILE}, and Headrace needs a tokenizer in that form: requests come as token ids. The engine's own "
            f"({type(tokenizer).__name__}) cannot be written as one"
        )
    try:
        return _write(str(backend.to_str()), folder, environ)
    except OSError as error:
        raise EngineStartFailed(f"{name} has no {FILE}, and one cannot be written: {error}") from None


def _cached(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in (FILE, "tokenizer_config.json", "config.json"):
        if isinstance(found := try_to_load_from_cache(name, file, revision=revision), str):
            return Path(found).parent
    return None


def _write(tokenizer: str, folder: Path | None, environ: Mapping[str, str]) -> Path:
    files = {FILE: tokenizer.encode()}
    if folder is not None:
        for path in sorted(path for pattern in _BESIDE for path in folder.glob(pattern)):
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    place = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace" / "tokenizers"
    made = place / digest.hexdigest()[:32]
    if not (made / FILE).is_file():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{made.name}.", suffix=".part", dir=place))
        try:
            for name, data in files.items():
                (part / name).parent.mkdir(exist_ok=True)
                (part / name).write_bytes(data)
            _put(part, made)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        log.info("tokenizer.written", folder=str(made), model=str(folder or ""))
    return made


def _put(part: Path, made: Path) -> None:
    try:
        part.rename(made)
    except OSError:
        if not (made / FILE).is_file():  # else another worker was there first, with the same content
            raise
