"""LoRA adapters of every engine: read from their folders, given room at the start, added and removed later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.lora import CONFIG, Adapter, Adapters, adapters_of, read_adapter, unknown_adapter
from headrace.workers.sglang import settings as sglang
from headrace.workers.trtllm import settings as trtllm
from headrace.workers.vllm import settings as vllm


def config(adapters: Any, served_name: str = "m") -> EngineConfig:
    return EngineConfig(model="folder", served_name=served_name, args={"adapters": adapters})


def folder(tmp_path: Path, name: str, config: Any) -> str:
    (tmp_path / name).mkdir()
    (tmp_path / name / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path / name)


def test_each_adapter_is_read_with_its_number(tmp_path: Path) -> None:
    one, other = folder(tmp_path, "a", {"r": 4}), folder(tmp_path, "b", {"r": 8, "target_modules": "q_proj"})
    assert adapters_of(config({"a": one, "b": other})) == {
        "a": Adapter("a", one, 4, (), 1),
        "b": Adapter("b", other, 8, ("q_proj",), 2),
    }
    assert adapters_of(config(None)) == {}


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


def test_a_rank_above_the_most_names_what_is_possible(tmp_path: Path) -> None:
    path = folder(tmp_path, "a", {"r": 65})
    assert read_adapter("a", path, most_rank=65).rank == 65
    with pytest.raises(EngineStartFailed, match="'a' has rank 65; 1 to 64 are possible"):
        adapters_of(config({"a": path}), most_rank=64)


def test_each_engine_makes_room_for_all_adapters_of_the_largest_rank() -> None:
    given = {"a": Adapter("a", "/a", 8, ("q_proj",), 1), "b": Adapter("b", "/b", 20, ("v_proj", "q_proj"), 2)}
    assert vllm.lora_args(given) == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}  # a rank that vLLM supports
    assert sglang.lora_args(given) == {
        "enable_lora": True,
        "max_lora_rank": 20,
        "max_loras_per_batch": 3,
        "lora_paths": ["a=/a", "b=/b"],
        "lora_target_modules": ["q_proj", "v_proj"],
    }
    room = {"lora_dir": ["/a", "/b"], "max_lora_rank": 20, "max_loras": 4, "max_cpu_loras": 8}
    assert trtllm.lora_settings(given) == room
    assert vllm.lora_args({}) == sglang.lora_args({}) == trtllm.lora_settings({}) == {}


class Notes:
    """An engine that notes what it loads and unloads."""

    def __init__(self) -> None:
        self.added: list[Adapter] = []
        self.removed: list[Adapter] = []
        self.refuses = False

    async def add(self, adapter: Adapter) -> None:
        if self.refuses:
            raise EngineError("no such module")
        self.added.append(adapter)

    async def remove(self, adapter: Adapter) -> None:
        self.removed.append(adapter)

    def running(self, *started_with: Adapter, most_rank: int | None = 16) -> Adapters:
        there = {adapter.name: adapter for adapter in started_with}
        return Adapters("E", there, room=None, most_rank=most_rank, add=self.add, remove=self.remove)


async def test_adapters_come_and_go_while_it_serves(tmp_path: Path) -> None:
    notes, more = Notes(), folder(tmp_path, "b", {"r": 16})
    running = notes.running(Adapter("a", "/a", 4, (), 1))
    assert running.changeable
    await running.do("load_adapter", {"name": "b", "source": more})
    await running.do("load_adapter", {"name": "b", "source": more})  # it is there
    assert (running.names, [one.number for one in notes.added]) == (("a", "b"), [2])
    assert running.of("b") is notes.added[0]
    assert running.of(None) is None
    for _ in range(2):
        await running.do("unload_adapter", {"name": "b"})
    assert (running.names, notes.removed) == (("a",), notes.added)
    assert running.names_by_number == {1: "a", 2: "b"}, "events of its blocks may still come"
    with pytest.raises(RequestInvalid, match="no adapter 'b'; it has: a") as refused:
        running.of("b")
    assert refused.value.param == "model"
    assert "it has: none" in str(unknown_adapter("x", []))


async def test_one_that_comes_again_is_another_load(tmp_path: Path) -> None:
    notes = Notes()
    running = notes.running()
    for version in ("v1", "v2", "v3"):
        await running.load("a", folder(tmp_path, version, {"r": 8}))
        await running.do("unload_adapter", {"name": "a"})
    assert [(one.number, one.turn) for one in notes.added] == [(1, 0), (2, 1), (3, 2)]


async def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    small, large = folder(tmp_path, "small", {"r": 8}), folder(tmp_path, "large", {"r": 64})
    notes = Notes()
    running = notes.running()
    for source, words in ((large, "rank 64; this E was started with max_lora_rank=16"), ("/nowhere", "cannot read")):
        with pytest.raises(EngineError, match=words):
            await running.load("a", source)
    await notes.running(most_rank=None).load("a", large)  # such an engine says so itself
    notes.refuses = True
    with pytest.raises(EngineError, match="no such module"):
        await running.load("a", small)
    assert running.names == ()
    notes.refuses = False
    await running.load("a", small)
    with pytest.raises(EngineError, match="already; unload it first"):
        await running.load("a", large)


async def test_an_engine_without_room_says_which_setting_gives_it() -> None:
    closed = Adapters("E", {}, room="enable_lora")
    assert not closed.changeable
    with pytest.raises(UnsupportedByEngine, match="load_adapter: this E was started without enable_lora"):
        await closed.do("load_adapter", {"name": "a", "source": "/a"})


class Vllm:
    """vLLM's way to load an adapter, which answers with `answer`."""

    def __init__(self, answer: bool | Exception) -> None:
        self.answer = answer
        self.removed: list[int] = []

    async def add_lora(self, _request: object) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def remove_lora(self, number: int) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.removed.append(number)
        return False  # vLLM had made room for another one


@pytest.fixture
def request_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "lora_request", lambda adapter: adapter)


@pytest.mark.usefixtures("request_of")
@pytest.mark.parametrize("answer", [False, ValueError("no such module")])
async def test_an_adapter_of_the_start_that_vllm_does_not_take_stops_it(answer: Any) -> None:
    with pytest.raises(EngineStartFailed, match="load the adapter 'a'"):
        await vllm.loaded_adapters(Vllm(answer), {"a": Adapter("a", "/a", 8, (), 1)}, most_rank=8)


@pytest.mark.usefixtures("request_of")
async def test_vllm_unloads_by_number_and_its_failures_are_ours() -> None:
    llm = Vllm(answer=True)
    running = await vllm.loaded_adapters(llm, {name: Adapter(name, "/a", 8, (), 1) for name in "ab"}, most_rank=8)
    await running.do("unload_adapter", {"name": "a"})
    assert llm.removed == [1]
    llm.answer = ValueError("gone")
    with pytest.raises(EngineError, match="vLLM cannot unload the adapter 'b': gone"):
        await running.do("unload_adapter", {"name": "b"})
    assert not (await vllm.loaded_adapters(llm, {}, most_rank=None)).changeable


@pytest.mark.slow
def test_each_load_has_a_name_of_its_own_in_vllm_and_one_for_clients() -> None:
    names = [vllm.lora_request(Adapter("a", "/a", 8, (), turn + 1, turn)).lora_name for turn in range(3)]
    assert len(set(names)) == 3
    assert {vllm.public_name(name) for name in names} == {"a"}
    assert vllm.public_name(None) is None
