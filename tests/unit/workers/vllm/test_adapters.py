"""Adapters of a vLLM worker: what is wrong with them is said before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.lora_adapters import CONFIG, adapters_of
from headrace.workers.vllm.adapters import Adapter, Adapters, load_adapters, lora_args, public_name, read_adapter


def config(adapters: Any, served_name: str = "m") -> EngineConfig:
    return EngineConfig(model="folder", served_name=served_name, args={"adapters": adapters})


def folder(tmp_path: Path, name: str, config: Any) -> str:
    (tmp_path / name).mkdir()
    (tmp_path / name / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path / name)


def test_each_has_a_number_of_its_own_and_there_is_room_for_all(tmp_path: Path) -> None:
    found = adapters_of(config({"a": folder(tmp_path, "a", {"r": 4}), "b": folder(tmp_path, "b", {"r": 20})}), read_adapter)
    assert [(adapter.name, adapter.number, adapter.rank) for adapter in found.values()] == [("a", 1, 4), ("b", 2, 20)]
    assert lora_args(found) == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}


def test_without_adapters_nothing_is_set() -> None:
    assert adapters_of(EngineConfig(model="folder", served_name="m"), read_adapter) == {}
    assert lora_args({}) == {}


def test_a_rank_that_vllm_does_not_support_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="'a' has rank 513; 1 to 512 are possible"):
        adapters_of(config({"a": folder(tmp_path, "a", {"r": 513})}), read_adapter)


def test_an_unknown_adapter_is_refused_with_those_there_are(tmp_path: Path) -> None:
    found = adapters_of(config({"a": folder(tmp_path, "a", {"r": 8})}), read_adapter)
    running = Adapters(None, found, most_rank=8)
    assert running.request_of(None) is None
    with pytest.raises(RequestInvalid, match="no adapter 'b'; it has: a") as refused:
        running.request_of("b")
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

    monkeypatch.setattr("headrace.workers.vllm.adapters.Adapter.request", lambda self: self)
    found = adapters_of(config({"a": folder(tmp_path, "a", {"r": 8})}), read_adapter)
    with pytest.raises(EngineStartFailed, match="load the adapter 'a'"):
        await load_adapters(Llm(), found)


class Llm:
    """Notes what it is asked."""

    def __init__(self, answer: bool | Exception = True) -> None:
        self.answer = answer
        self.added: list[Adapter] = []
        self.removed: list[int] = []

    async def add_lora(self, adapter: Adapter) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.added.append(adapter)
        return self.answer

    async def remove_lora(self, number: int) -> bool:
        self.removed.append(number)
        return False  # vLLM had made room for another one


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Llm:
    monkeypatch.setattr("headrace.workers.vllm.adapters.Adapter.request", lambda self: self)
    return Llm()


async def test_adapters_come_and_go_while_it_serves(tmp_path: Path, llm: Llm) -> None:
    first = adapters_of(config({"a": folder(tmp_path, "a", {"r": 4})}), read_adapter)
    running, more = Adapters(llm, first, most_rank=16), folder(tmp_path, "b", {"r": 16})
    assert running.changeable
    await running.load("b", more)
    await running.load("b", more)  # it is there
    assert (running.names, len(llm.added), llm.added[0].number) == (("a", "b"), 1, 2)
    assert running.request_of("b") is llm.added[0]
    await running.unload("b")
    await running.unload("b")
    assert (running.names, llm.removed) == (("a",), [2])
    with pytest.raises(RequestInvalid):
        running.request_of("b")


@pytest.mark.slow
async def test_one_that_comes_again_finds_no_blocks_of_the_one_before(tmp_path: Path) -> None:
    names = []

    class Core(Llm):
        async def add_lora(self, request: Any) -> bool:
            names.append((request.lora_name, request.lora_int_id))
            return True

    running = Adapters(Core(), {}, most_rank=8)
    for version in ("v1", "v2", "v3"):
        await running.load("a", folder(tmp_path, version, {"r": 8}))
        await running.unload("a")
    assert len({name for name, _ in names}) == len({number for _, number in names}) == 3
    assert {public_name(name) for name, _ in names} == {"a"}
    assert public_name(None) is None


async def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path, llm: Llm) -> None:
    small, large = folder(tmp_path, "small", {"r": 8}), folder(tmp_path, "large", {"r": 64})
    running = Adapters(llm, {}, most_rank=16)
    for source, words in ((large, "rank 64; this vLLM was started with max_lora_rank=16"), ("/nowhere", "cannot read")):
        with pytest.raises(EngineError, match=words):
            await running.load("a", source)
    llm.answer = ValueError("no such module")
    with pytest.raises(EngineError, match="no such module"):
        await running.load("a", small)
    assert running.names == ()
    llm.answer = True
    await running.load("a", small)
    with pytest.raises(EngineError, match="already; unload it first"):
        await running.load("a", folder(tmp_path, "other", {"r": 8}))
    closed = Adapters(llm, {}, most_rank=None)
    assert not closed.changeable
    with pytest.raises(UnsupportedByEngine, match="enable_lora"):
        await closed.load("a", small)
