"""Adapters of a vLLM worker: what is wrong with them is said before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.engine import EngineConfig
from workers.errors import EngineStartFailed, RequestInvalid
from workers.vllm.adapters import CONFIG, adapters_of, load_adapters, lora_args, request_of


def config(adapters: Any, served_name: str = "m") -> EngineConfig:
    return EngineConfig(model="folder", served_name=served_name, args={"adapters": adapters})


def folder(tmp_path: Path, name: str, config: Any) -> str:
    (tmp_path / name).mkdir()
    (tmp_path / name / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path / name)


def test_each_has_a_number_of_its_own_and_there_is_room_for_all(tmp_path: Path) -> None:
    found = adapters_of(config({"a": folder(tmp_path, "a", {"r": 4}), "b": folder(tmp_path, "b", {"r": 20})}))
    assert [(adapter.name, adapter.number, adapter.rank) for adapter in found.values()] == [("a", 1, 4), ("b", 2, 20)]
    assert lora_args(found) == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}


def test_without_adapters_nothing_is_set() -> None:
    assert adapters_of(EngineConfig(model="folder", served_name="m")) == {}
    assert lora_args({}) == {}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{", "is no adapter's configuration"),
        ({}, "is no adapter's configuration"),
        ([], "is no adapter's configuration"),
        ({"r": 0}, "has rank 0; 1 to 512"),
        ({"r": 513}, "has rank 513"),
        ({"r": "8"}, "has rank '8'"),
    ],
)
def test_a_configuration_that_says_nothing_stops_the_start(tmp_path: Path, written: Any, words: str) -> None:
    with pytest.raises(EngineStartFailed, match=words):
        adapters_of(config({"a": folder(tmp_path, "a", written)}))


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
        adapters_of(config(given))


def test_an_unknown_adapter_is_refused_with_those_there_are(tmp_path: Path) -> None:
    found = adapters_of(config({"a": folder(tmp_path, "a", {"r": 8})}))
    assert request_of(found, None) is None
    with pytest.raises(RequestInvalid, match="no adapter 'b'; it has: a") as refused:
        request_of(found, "b")
    assert refused.value.param == "model"


@pytest.mark.parametrize("answer", [False, ValueError("no such module")])
async def test_one_that_the_engine_does_not_take_stops_the_start(
    tmp_path: Path, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Llm:
        async def add_lora(self, _request: object) -> bool:
            if isinstance(answer, Exception):
                raise answer
            return bool(answer)

    monkeypatch.setattr("workers.vllm.adapters.Adapter.request", lambda self: self)
    found = adapters_of(config({"a": folder(tmp_path, "a", {"r": 8})}))
    with pytest.raises(EngineStartFailed, match="load the adapter 'a'"):
        await load_adapters(Llm(), found)
