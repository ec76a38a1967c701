"""The worker's side of SGLang, with a stand-in for the child process: what it is started with, and what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, EngineInfo, Load, Output, PoolItem, Role, Sequence
from headrace.workers.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineStartFailed,
    RequestInvalid,
    UnsupportedByEngine,
)
from headrace.workers.sglang import messages
from headrace.workers.sglang.engine import SglangEngine

pytest.importorskip("zmq")  # comes with the engines


STAND_IN = Path(__file__).parents[3] / "support" / "sglang_child_stand_in.py"


def sequence(name: str, tokens: list[int] | None = None) -> Sequence:
    tokens = tokens or [5, 6, 7]
    return Sequence(id=name, token_ids=tokens, prompt_tokens=len(tokens), sampling=Sampling(max_tokens=9))


class Bench:
    def __init__(self, record: Path) -> None:
        self.engine = SglangEngine()
        self.got: list[Output] = []
        self.info: EngineInfo
        self._record = record

    @property
    def started_with(self) -> dict[str, Any]:
        return json.loads(self._record.read_text())  # type: ignore[no-any-return]

    def ids(self, name: str) -> list[int]:
        return [token for output in self.got if output.id == name for token in output.ids]

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not met():
                await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(messages, "_COMMAND", ("-P", str(STAND_IN)))
    monkeypatch.setenv("STAND_IN_RECORD", str(tmp_path / "record.json"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")]))
    return tmp_path / "record.json"


@contextlib.asynccontextmanager
async def running(record: Path, role: Role = Role.AGGREGATED, **args: Any) -> AsyncIterator[Bench]:
    bench = Bench(record)
    try:
        bench.info = await bench.engine.start(EngineConfig(model="m", served_name="s", role=role, args=args), bench.got.extend)
        yield bench
    finally:
        await bench.engine.stop(2.0)


SHAPES: dict[str, dict[str, Any]] = {
    "a node of several": {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5000", "tp_size": 2},
    "data-parallel ranks": {"dp_size": 2, "enable_dp_attention": True, "tp_size": 2},
    "a diffusion language model": {"dllm_algorithm": "LowConfidence", "dllm_algorithm_config": "/m/dllm.yaml"},
    "an encoder alone": {"encoder_only": True, "encoder_transfer_backend": "zmq_to_scheduler"},
    "a language model alone": {"language_only": True, "encoder_urls": ["http://10.0.0.2:30000"]},
    "a hierarchical cache": {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_storage_backend": "file"},
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_settings_of_each_launch_shape_reach_sglang_unchanged(stand_in: Path, shape: str) -> None:
    async with running(stand_in, **SHAPES[shape]) as bench:
        fields = bench.started_with["fields"]
        assert SHAPES[shape].items() <= fields.items()
        assert (fields["model_path"], fields["served_model_name"]) == ("m", "s")


async def test_a_node_after_the_first_takes_no_requests_and_tells_no_events(stand_in: Path) -> None:
    async with running(stand_in, **SHAPES["a node of several"]) as bench:
        assert bench.info.follows
        assert "kv_events_config" not in bench.started_with["fields"]
        assert not bench.engine.capabilities.kv_events
        with pytest.raises(UnsupportedByEngine, match="its first node takes requests"):
            await bench.engine.submit(sequence("a"))
    async with running(stand_in, **SHAPES["a node of several"] | {"node_rank": 0}) as bench:
        assert not bench.info.follows


async def test_every_rank_has_a_socket_for_events_unless_some_are_elsewhere(stand_in: Path) -> None:
    async with running(stand_in, dp_size=2) as bench:
        config = json.loads(bench.started_with["fields"]["kv_events_config"])
        assert config["endpoint"].startswith("tcp://127.0.0.1:")
        assert config["replay_endpoint"].startswith("tcp://127.0.0.1:"), "a path cannot be counted on"
        assert bench.engine.capabilities.kv_events
        for rank in (0, 1):
            await anext(bench.engine.kv_events(rank))
    async with running(stand_in, dp_size=2, nnodes=2) as bench:
        assert "kv_events_config" not in bench.started_with["fields"]
        assert not bench.engine.capabilities.kv_events
        with pytest.raises(UnsupportedByEngine, match="without KV events"):
            bench.engine.kv_events()


async def test_a_sequence_is_run_and_its_tokens_come_back(stand_in: Path) -> None:
    async with running(stand_in) as bench:
        await bench.engine.submit(sequence("a"))
        await bench.until(lambda: bool(bench.got) and bench.got[-1].finish is not None)
        assert bench.ids("a") == [5, 6, 7]
        assert bench.engine.load() == Load(blocks_total=10) or bench.engine.load().running == 1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("invalid", RequestInvalid),
        ("unsupported", UnsupportedByEngine),
        ("overloaded", EngineOverloaded),
        ("failed", EngineError),
    ],
)
async def test_a_refusal_is_raised_with_its_kind_and_the_sequence_is_forgotten(
    stand_in: Path, name: str, error: type[Exception]
) -> None:
    async with running(stand_in) as bench:
        with pytest.raises(error, match="is refused") as caught:
            await bench.engine.submit(sequence(name))
        if name == "invalid":
            assert getattr(caught.value, "param", None) == "param"
        assert name not in bench.engine._open


async def test_an_aborted_sequence_gets_nothing_more(stand_in: Path) -> None:
    async with running(stand_in) as bench:
        await bench.engine.submit(sequence("silent"))
        await bench.engine.abort(["silent", "unknown"])  # the stand-in sends a token that was under way
        await bench.engine.submit(sequence("a"))
        await bench.until(lambda: bool(bench.got) and bench.got[-1].finish is not None)
        assert bench.ids("silent") == []


async def test_vectors_and_operations_are_answered(stand_in: Path) -> None:
    async with running(stand_in, is_embedding=True) as bench:
        pooled = await bench.engine.pool(PoolItem(id="p", task="embed", token_ids=[1]))
        assert (pooled.vector, pooled.cached_tokens) == (b"\0\0\x80?", 3)
        assert await bench.engine.control("reset_prefix_cache", {}) == {"did": "reset_prefix_cache"}
        assert not bench.engine.capabilities.kv_events, "there are no prefixes to route by"
        with pytest.raises(UnsupportedByEngine, match="not decode"):
            await bench.engine.set_role(Role.DECODE)


async def test_the_death_of_the_child_is_the_engines(stand_in: Path) -> None:
    async with running(stand_in) as bench:
        await bench.engine.submit(sequence("silent"))
        with pytest.raises(EngineDead):
            await bench.engine.submit(sequence("die"))
        async with asyncio.timeout(10):
            assert "process is gone" in await bench.engine.died()
        with pytest.raises(EngineDead):
            await bench.engine.healthy()
        with pytest.raises(EngineDead):
            await bench.engine.submit(sequence("b"))


async def test_nothing_is_left_after_a_stop(stand_in: Path) -> None:
    async with running(stand_in) as bench:
        pid = bench.engine.child_pid
        folder = bench.engine._folder
        assert pid is not None
        assert folder is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()
    assert bench.engine.child_pid is None


@pytest.mark.parametrize(("how", "told"), [("refuse", "no setting 'x'"), ("die", "exit code 3")])
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, how: str, told: str
) -> None:
    monkeypatch.setenv("STAND_IN_START", how)
    bench = Bench(stand_in)
    with pytest.raises(EngineStartFailed, match=told):
        await bench.engine.start(EngineConfig(model="m", served_name="s"), bench.got.extend)
    assert bench.engine._folder is not None
    assert not bench.engine._folder.exists()
