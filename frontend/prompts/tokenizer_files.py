"""Reads the tokenizer files of a model as transformers does: templates by name, and the names of special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.frontend.errors import ModelUnusable
from headrace.frontend.prompts.templates import DEFAULT

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"  # of models whose configuration does not list the special tokens
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates/"
OLD_TEMPLATE = "chat_template.json"
_STANDARD = frozenset({"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The tokenizer of a model. `names` has the special tokens that templates know by name; `special_tokens` has all."""

    tokenizer: bytes
    templates: Mapping[str, str]
    names: Mapping[str, str]
    special_tokens: tuple[str, ...]

    @classmethod
    def read(cls, files: Mapping[str, bytes], model: str) -> ModelFiles:
        """Read the files of a model. Raises ModelUnusable naming the file that is missing or not valid."""
        if TOKENIZER not in files:
            raise ModelUnusable(f"the card of {model!r} has no {TOKENIZER}")
        config = _json(files, CONFIG, model)
        if "added_tokens_decoder" not in config:
            config |= _json(files, SPECIAL_TOKENS, model)
        named = {key: text for key, value in config.items() if key.endswith("_token") and (text := _text(value, key))}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
        if isinstance(extra, dict):
            named |= {str(key): text for key, value in extra.items() if (text := _text(value))}
            extra = ()
        more = [text for value in extra if (text := _text(value))] if isinstance(extra, list) else []
        return cls(
            tokenizer=files[TOKENIZER],
            templates=_templates(files, config, model),
            names=named,
            special_tokens=(*named.values(), *more),
        )


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any], model: str) -> dict[str, str]:
    """Return the templates: from their files, else from the configuration, else from the file of older models."""
    try:
        found = {
            name.removeprefix(MORE_TEMPLATES).removesuffix(".jinja"): data.decode()
            for name, data in files.items()
            if name.startswith(MORE_TEMPLATES) and name.endswith(".jinja")
        }
        if TEMPLATE in files:
            found[DEFAULT] = files[TEMPLATE].decode()
    except UnicodeDecodeError as error:
        raise ModelUnusable(f"a chat template of {model!r} is not valid: {error}") from None
    if found:
        return found
    for source in (config.get("chat_template"), _json(files, OLD_TEMPLATE, model).get("chat_template")):
        if isinstance(source, str):
            return {DEFAULT: source}
        if isinstance(source, list):
            return {
                entry["name"]: entry["template"]
                for entry in source
                if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
            }
    return {}


def _json(files: Mapping[str, bytes], name: str, model: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        return msgspec.json.decode(files[name], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ModelUnusable(f"{name} of {model!r} is not valid: {error}") from None


def _text(value: object, key: str = "") -> str | None:
    """Return a token as text. Older configurations write tokens with a standard name as a map."""
    if isinstance(value, dict) and (not key or key in _STANDARD or value.get("__type") == "AddedToken"):
        value = value.get("content")
    return value if isinstance(value, str) else None
