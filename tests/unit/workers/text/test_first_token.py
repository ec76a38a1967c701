"""The token with which a model's prompts begin, out of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.text.first_token import first_token

VOCAB = {"a": 0, "b": 1, "<s>": 7}
FILES = dict[str, Any]


def write(folder: Path, files: FILES) -> Path:
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {
                "tokenizer_config.json": {"bos_token": "<bos>"},
                "tokenizer.json": {"added_tokens": [{"id": 5, "content": "<bos>"}], "model": {"vocab": VOCAB}},
                "config.json": {"bos_token_id": 9},
            },
            5,
            id="an added token; the tokenizer's word goes before the configuration's",
        ),
        pytest.param(
            {"tokenizer_config.json": {"bos_token": {"content": "<s>"}}, "tokenizer.json": {"model": {"vocab": VOCAB}}},
            7,
            id="a token of the vocabulary, in the older form",
        ),
        pytest.param(
            {"special_tokens_map.json": {"bos_token": "b"}, "tokenizer.json": {"model": {"vocab": [["a", 0.1], ["b", 0.2]]}}},
            1,
            id="a Unigram vocabulary",
        ),
        pytest.param({"config.json": {"bos_token_id": 9}}, 9, id="of the configuration"),
        pytest.param(
            {"generation_config.json": {"bos_token_id": 8}, "config.json": {"bos_token_id": 9}}, 8, id="of the generation"
        ),
        pytest.param(
            {"tokenizer_config.json": {"bos_token": None}, "tokenizer.json": {"model": {"vocab": VOCAB}}}, 1, id="none"
        ),
        pytest.param({"config.json": {"bos_token_id": 999}}, 1, id="outside the vocabulary"),
        pytest.param({"config.json": {"bos_token_id": True}}, 1, id="no number"),
        pytest.param({"tokenizer_config.json": "{", "config.json": "[]"}, 1, id="damaged files"),
        pytest.param({}, 1, id="nothing"),
    ],
)
def test_it_is_found(tmp_path: Path, files: FILES, expected: int) -> None:
    assert first_token(write(tmp_path, files), vocab_size=100) == expected


def test_a_vocabulary_of_one_token_has_only_that() -> None:
    assert first_token("/nowhere", vocab_size=1) == 0
