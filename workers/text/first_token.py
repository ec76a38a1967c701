"""Finds the token with which a model's prompts begin: its BOS, for requests that Headrace makes up itself.

Some models answer nonsense, or fail in an assertion, when a sequence does not begin as their training did.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

CONFIGS = ("generation_config.json", "config.json")  # the tokenizer's own word goes before these


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _Tokenizer(msgspec.Struct):
    added_tokens: list[dict[str, Any]] = []
    model: _Model = msgspec.field(default_factory=_Model)


def first_token(folder: str | Path, *, vocab_size: int) -> int:
    """Return the id of the model's BOS, or where it has none a token that every vocabulary has: 1, or 0 in a tiny one.

    Reads files, of which a tokenizer may have some 10 MB, so call it in a thread.
    """
    found = _by_tokenizer(Path(folder))
    for name in CONFIGS:
        if found is None:
            given = _json(Path(folder) / name).get("bos_token_id")
            found = given if isinstance(given, int) and not isinstance(given, bool) else None
    if found is None or not 0 <= found < vocab_size:
        return 1 if vocab_size > 1 else 0
    return found


def _by_tokenizer(folder: Path) -> int | None:
    text = _json(folder / "tokenizer_config.json").get("bos_token") or _json(folder / "special_tokens_map.json").get(
        "bos_token"
    )
    if isinstance(text, dict):  # as older configurations write it
        text = text.get("content")
    if not isinstance(text, str):
        return None
    with suppress(OSError, msgspec.DecodeError, KeyError):
        tokenizer = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Tokenizer)
        added = next((token["id"] for token in tokenizer.added_tokens if token.get("content") == text), None)
        if added is not None:
            return int(added)
        vocabulary = tokenizer.model.vocab
        if isinstance(vocabulary, dict):
            return vocabulary.get(text)
        return next((i for i, entry in enumerate(vocabulary) if entry and entry[0] == text), None)
    return None


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}
