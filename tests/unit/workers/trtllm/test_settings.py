"""Our settings as TensorRT-LLM's, log levels, and what a model's files say."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.trtllm.model_files import local_folder, read_model
from headrace.workers.trtllm.settings import LOG_LEVELS, prepare_environment
from tests.support import tensorrt_llm_stand_in as stand_in


@pytest.mark.parametrize(("ours", "theirs"), [("debug", "verbose"), ("INFO", "info"), ("warning", "warning"), ("odd", "info")])
def test_the_log_level_is_handed_on_in_its_own_words(ours: str, theirs: str) -> None:
    environ = {"HEADRACE_LOG_LEVEL": ours}
    prepare_environment(environ)
    assert environ["TLLM_LOG_LEVEL"] == theirs
    kept = {"TLLM_LOG_LEVEL": "trace"}
    prepare_environment(kept)
    assert kept["TLLM_LOG_LEVEL"] == "trace"


def test_every_log_level_of_ours_has_one_of_theirs() -> None:
    assert {name.upper() for name in LOG_LEVELS} <= logging.getLevelNamesMapping().keys()


def test_a_model_says_its_length_its_vocabulary_and_its_end_tokens(tmp_path: Path) -> None:
    folder = stand_in.model_folder(tmp_path / "m", context_length=1000)
    files = read_model(local_folder(str(folder)))
    assert (files.context_length, files.vocab_size, files.eos_token_ids, files.chat) == (1000, 49152, (2,), True)
    generation = {"eos_token_id": [2, 7], "temperature": 0.6, "top_p": "no"}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    files = read_model(folder)
    assert (files.eos_token_ids, files.default_sampling) == ((2, 7), {"temperature": 0.6})
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 5, "max_position_embeddings": 6}}))
    (folder / "generation_config.json").unlink()
    files = read_model(folder)
    assert (files.vocab_size, files.context_length, files.eos_token_ids) == (5, 6, (2,))  # the tokenizer's own end token


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "is not an object"),
        ("config.json", "{}", "has no vocab_size"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("config.json", None, "cannot read"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: str | None, told: str) -> None:
    folder = stand_in.model_folder(tmp_path / "m")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(EngineStartFailed, match=told):
        read_model(folder)
