"""A model, and what is loaded with it, comes from where the operator allows and from nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.workers.errors import ModelSourceRefused
from headrace.workers.settings import check_loaded_sources, check_model_source, check_rules

DEFAULT = ("folder", "hf")


@pytest.mark.parametrize(
    ("rules", "model", "fine"),
    [
        (DEFAULT, "Qwen/Qwen3-0.6B", True),
        (DEFAULT, "gpt2", True),
        (DEFAULT, "/models/qwen", True),
        (DEFAULT, "s3://bucket/model", False),
        (DEFAULT, "https://host/model", False),
        (DEFAULT, "file:///models/qwen", False),
        (["hf://Qwen"], "Qwen/Qwen3-0.6B", True),
        (["hf://Qwen"], "Qwen/Qwen3-0.6B-GGUF:Q4_K_M", True),
        (["hf://Qwen"], "Qwen-evil/Qwen3-0.6B", False),
        (["hf://Qwen"], "evil/Qwen", False),
        (["hf://Qwen"], "Qwen", True),
        (["hf://Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B", True),
        (["hf://Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B-Base", False),
        (["hf://Qwen"], "/models/Qwen", False),
        (["/models"], "/models/qwen", True),
        (["/models"], "/models-evil/qwen", False),
        (["/models"], "/models/../etc/qwen", False),
        (["/models"], "Qwen/Qwen3-0.6B", False),
        (["s3"], "s3://any/model", True),
        (["s3://bucket/llms"], "s3://bucket/llms/qwen", True),
        (["s3://bucket/llms"], "s3://bucket/llms-evil/qwen", False),
        (["s3://bucket/llms"], "s3://bucket/llms/../other/qwen", False),
        (["s3://bucket/llms"], "S3://bucket/llms/qwen", True),
        (["https://host/llms"], "https://host/llms/qwen?x=1", True),
        (["https://host/llms"], "https://host/other?/llms/qwen", False),
        ([], "Qwen/Qwen3-0.6B", False),
    ],
)
def test_rules_allow_kinds_and_what_lies_below_places(rules: list[str], model: str, fine: bool) -> None:
    check_rules(rules)
    if fine:
        check_model_source(model, rules)
        return
    with pytest.raises(ModelSourceRefused, match=r"not allowed here; worker\.model_sources allows"):
        check_model_source(model, rules)


def test_a_folder_beside_the_process_is_a_folder_and_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    with pytest.raises(ModelSourceRefused, match=str(tmp_path)):
        check_model_source("Qwen/Qwen3-0.6B", ["hf://Qwen"])


def test_a_link_out_of_an_allowed_folder_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    with pytest.raises(ModelSourceRefused, match=str(outside)):
        check_model_source(str(inside / "link"), [str(inside)])


@pytest.mark.parametrize(
    "args",
    [
        {"model": "evil/model"},
        {"tokenizer": "evil/tokenizer"},
        {"hf_config_path": "evil/config"},
        {"speculative_config": {"method": "eagle", "model": "evil/draft"}},
        {"speculative-draft-model-path": "evil/draft"},
        {"speculative_config": {"decoding_type": "Eagle", "speculative_model_dir": "/evil"}},
    ],
)
def test_what_an_engines_settings_have_it_load_is_held_to_the_same_rules(args: dict[str, object]) -> None:
    with pytest.raises(ModelSourceRefused, match=r"^[\w.-]+: models from .*evil"):
        check_loaded_sources(args, ["hf://Qwen"])


def test_settings_that_load_nothing_pass() -> None:
    args = {"max_model_len": 1, "tokenizer_mode": "auto", "speculative_config": {"method": "ngram", "model": "ngram"}}
    check_loaded_sources(args, ["hf://Qwen"])
    check_loaded_sources({"tokenizer": "Qwen/Qwen3-0.6B"}, ["hf://Qwen"])


@pytest.mark.parametrize("rule", ["", "models", "./models", "folders", "://x", "hf://"])
def test_a_rule_that_means_nothing_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="model_sources"):
        check_rules([rule])
