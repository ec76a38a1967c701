"""Tokenizer files are read as transformers reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.frontend.errors import ModelUnusable
from headrace.frontend.prompts.model_cache import ModelFiles


def read(config: dict[str, Any] | None = None, **files: str) -> ModelFiles:
    given = {name.replace("__", "."): text.encode() for name, text in files.items()}
    if config is not None:
        given["tokenizer_config.json"] = json.dumps(config).encode()
    return ModelFiles.read({"tokenizer.json": b"{}", **given}, "m")


def test_a_template_file_goes_before_the_configuration() -> None:
    assert read({"chat_template": "config"}).templates == {"default": "config"}
    assert read({"chat_template": "config"}, chat_template__jinja="file").templates == {"default": "file"}
    assert read({"chat_template": "config"}, chat_template__json='{"chat_template": "old"}').templates == {"default": "config"}
    assert read({}, chat_template__json='{"chat_template": "old"}').templates == {"default": "old"}
    assert read({}).templates == {}


def test_several_templates_have_names() -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}, {"name": 3}]
    assert read({"chat_template": listed}).templates == {"default": "a", "tool_use": "b"}
    files = {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"a",
        "additional_chat_templates/rag.jinja": b"c",
        "additional_chat_templates/notes.txt": b"d",
    }
    assert ModelFiles.read(files, "m").templates == {"default": "a", "rag": "c"}


def test_extra_tokens_may_be_named() -> None:
    files = read({"extra_special_tokens": {"boi_token": "<boi>"}})
    assert (files.names, files.special_tokens) == ({"boi_token": "<boi>"}, ("<boi>",))


def test_older_models_name_them_in_a_file_of_its_own() -> None:
    files = read({"bos_token": "<a>"}, special_tokens_map__json='{"bos_token": {"content": "<b>"}, "eos_token": "<c>"}')
    assert files.names == {"bos_token": "<b>", "eos_token": "<c>"}


def test_what_is_missing_or_damaged_is_named() -> None:
    with pytest.raises(ModelUnusable, match=r"no tokenizer\.json"):
        ModelFiles.read({}, "m")
    for name in ("tokenizer_config__json", "special_tokens_map__json", "chat_template__json"):
        with pytest.raises(ModelUnusable, match=name.replace("__", r"\.")):
            read(**{name: "[1"})
    with pytest.raises(ModelUnusable, match="chat template"):
        ModelFiles.read({"tokenizer.json": b"{}", "chat_template.jinja": b"\xff"}, "m")
