"""The adapters that settings name are read before a model is loaded, and what is wrong with one is said by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineError, EngineStartFailed
from headrace.workers.lora_adapters import CONFIG, LoraConfig, adapters_of, read_config, unknown_adapter


def config(adapters: Any, served_name: str = "m") -> EngineConfig:
    return EngineConfig(model="folder", served_name=served_name, args={"adapters": adapters})


def folder(tmp_path: Path, name: str, config: Any) -> str:
    (tmp_path / name).mkdir()
    (tmp_path / name / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path / name)


def record(name: str, folder: str, number: int) -> tuple[str, int, LoraConfig]:
    return name, number, read_config(name, folder)


def test_each_adapter_is_read_with_its_number(tmp_path: Path) -> None:
    given = {"a": folder(tmp_path, "a", {"r": 4}), "b": folder(tmp_path, "b", {"r": 8, "target_modules": "q_proj"})}
    assert adapters_of(config(given), record) == {
        "a": ("a", 1, LoraConfig(4, ())),
        "b": ("b", 2, LoraConfig(8, ("q_proj",))),
    }
    assert adapters_of(config(None), record) == {}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{", "is no adapter's configuration"),
        ({}, "is no adapter's configuration"),
        ([], "is no adapter's configuration"),
        ({"r": 0}, "has rank 0; it must be 1 or more"),
        ({"r": "8"}, "has rank '8'"),
    ],
)
def test_a_configuration_that_says_nothing_stops_the_start(tmp_path: Path, written: Any, words: str) -> None:
    with pytest.raises(EngineStartFailed, match=words):
        adapters_of(config({"a": folder(tmp_path, "a", written)}), record)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a"], "must be a map of names to folders"),
        ({"a": 1}, "'a' must name a folder, got 1"),
        ({"": "x"}, "'' must name a folder"),
        ({"m": "x"}, "'m' is the name of the model itself"),
        ({"a": "/nowhere"}, "'a' is no adapter: cannot read /nowhere/adapter_config.json"),
    ],
)
def test_what_is_no_adapter_stops_the_start(given: Any, words: str) -> None:
    with pytest.raises(EngineStartFailed, match=words):
        adapters_of(config(given), record)


def test_a_rank_above_the_most_names_what_is_possible(tmp_path: Path) -> None:
    path = folder(tmp_path, "a", {"r": 65})
    assert read_config("a", path, most_rank=65).rank == 65
    with pytest.raises(EngineError, match="'a' has rank 65; 1 to 64 are possible"):
        read_config("a", path, most_rank=64)


def test_a_refusal_names_the_adapters_that_there_are() -> None:
    assert "no adapter 'x'; it has: a, b" in str(unknown_adapter("x", ["a", "b"]))
    assert "it has: none" in str(unknown_adapter("x", []))
