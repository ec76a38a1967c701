"""Reads from a model's folder what TensorRT-LLM does not tell: context length, vocabulary and end tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.workers.errors import EngineStartFailed

_LENGTHS = ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length", "model_max_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts that the files of a model tell."""

    folder: Path
    context_length: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat: bool  # there is a chat template
    default_sampling: dict[str, Any]


def local_folder(model: str) -> Path:
    """Return the model's folder; a Hugging Face id is downloaded first. Blocks. Raises EngineStartFailed."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model))
    except Exception as error:  # the hub's errors are many
        raise EngineStartFailed(f"the model {model!r} is no folder, and the hub did not give it: {error}") from error


def read_model(folder: Path) -> ModelFacts:
    """Read a model's configuration. Raises EngineStartFailed for a missing or damaged one."""
    config = _json(folder / "config.json", needed=True)
    if not (folder / "tokenizer.json").is_file():
        raise EngineStartFailed(f"{folder} has no tokenizer.json; Headrace needs a tokenizer in that form")
    inner = config.get("text_config")
    text: dict[str, Any] = inner if isinstance(inner, dict) else {}
    generation = _json(folder / "generation_config.json")
    vocab = config.get("vocab_size", text.get("vocab_size"))
    if not isinstance(vocab, int):
        raise EngineStartFailed(f"{folder / 'config.json'} has no vocab_size")
    lengths = [value for name in _LENGTHS for value in (config.get(name), text.get(name)) if isinstance(value, int)]
    tokenizer = _json(folder / "tokenizer_config.json")
    eos = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id", text.get("eos_token_id")))]
    if not eos:
        eos = _named_token(folder, tokenizer.get("eos_token"))
    return ModelFacts(
        folder=folder,
        context_length=lengths[0] if lengths else None,
        vocab_size=vocab,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        chat=(folder / "chat_template.jinja").is_file() or "chat_template" in tokenizer,
        default_sampling={
            name: generation[name]
            for name in ("temperature", "top_p", "top_k")
            if isinstance(generation.get(name), int | float)
        },
    )


def _json(path: Path, *, needed: bool = False) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        if needed:
            raise EngineStartFailed(f"cannot read {path}: {error.strerror}") from None
        return {}
    except ValueError as error:
        raise EngineStartFailed(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise EngineStartFailed(f"{path} is not an object")
    return found


def _ids(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [one for one in found if isinstance(one, int) and not isinstance(one, bool)]


def _named_token(folder: Path, name: Any) -> list[int]:
    """Return the id of an added token by its text."""
    text = name.get("content") if isinstance(name, dict) else name
    added = _json(folder / "tokenizer.json").get("added_tokens") or ()
    return [one["id"] for one in added if one.get("content") == text]
