"""A TensorRT-LLM engine on the stand-in package, and all that comes out of it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, EngineInfo, KvEvent, Output, Role, Sequence
from headrace.workers.trtllm.engine import TrtllmEngine
from tests.support import tensorrt_llm_stand_in as stand_in

versions = pytest.mark.parametrize("version", stand_in.VERSIONS)

PROMPT = list(range(100, 180))  # 80 tokens: two and a half blocks of 32


def sequence(name: str, tokens: list[int] | None = None, *, max_tokens: int = 10, **options: Any) -> Sequence:
    tokens = PROMPT if tokens is None else tokens
    sampling = options.pop("sampling", None) or Sampling(max_tokens=max_tokens, temperature=0.0)
    return Sequence(
        id=name, token_ids=tokens, prompt_tokens=options.pop("prompt_tokens", len(tokens)), sampling=sampling, **options
    )


class EngineBench:
    def __init__(self) -> None:
        self.engine = TrtllmEngine()
        self.info: EngineInfo
        self.calls: list[list[Output]] = []
        self._changed = asyncio.Event()

    def sink(self, outputs: list[Output]) -> None:
        self.calls.append(outputs)
        self._changed.set()

    @property
    def llm(self) -> Any:
        return self.engine._started.llm

    def outputs(self, name: str) -> list[Output]:
        return [output for call in self.calls for output in call if output.id == name]

    def ids(self, name: str) -> list[int]:
        return [token for output in self.outputs(name) for token in output.ids]

    def last(self, name: str) -> Output:
        return self.outputs(name)[-1]

    def ended(self, name: str) -> bool:
        found = self.outputs(name)
        return bool(found) and (found[-1].finish is not None or found[-1].fault is not None)

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not met():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.02)

    async def run(self, *sequences: Sequence) -> None:
        for one in sequences:
            await self.engine.submit(one)
        await self.until(lambda: all(self.ended(one.id) for one in sequences))


@functools.cache
def shared_model() -> Path:
    """Make the model once per process: its token table takes half a second to read, and is kept by its path."""
    folder = Path(tempfile.mkdtemp(prefix="trtllm-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return stand_in.model_folder(folder)


@contextlib.asynccontextmanager
async def running(
    *,
    version: str = stand_in.V1_3,
    role: Role = Role.AGGREGATED,
    options: dict[str, Any] | None = None,
    **args: Any,
) -> AsyncIterator[EngineBench]:
    """A started engine. `options` are the stand-in's own."""
    bench = EngineBench()
    config = EngineConfig(
        model=str(shared_model()),
        served_name="m",
        role=role,
        args={"max_batch_size": 16, "model_kwargs": {"stand_in": options or {}}, **args},
    )
    with stand_in.installed(version):
        try:
            bench.info = await bench.engine.start(config, bench.sink)
            yield bench
        finally:
            await bench.engine.stop(1.0)


class CacheView:
    """What a reader of the engine's KV events knows: tier → hash → the tokens of its block."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], int] = {}  # (tier, hash) → copies
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.numbers: list[int] = []
        self.partial = False

    def apply(self, events: list[KvEvent]) -> None:
        for event in events:
            if event.kind == "cleared":
                self.held.clear()
            for place, name in enumerate(event.hashes):
                key = (event.tier, name)
                if event.kind == "stored":
                    size = len(event.token_ids) // len(event.hashes)
                    self.tokens[name] = tuple(event.token_ids[place * size : (place + 1) * size])
                    self.held[key] = self.held.get(key, 0) + 1
                else:
                    self.held[key] -= 1
                    if not self.held[key]:
                        del self.held[key]

    def tier(self, tier: str) -> list[tuple[int, ...]]:
        return [self.tokens[name] for (one, name) in self.held if one == tier]


def inventory(bench: EngineBench) -> list[KvEvent]:
    started = bench.engine._started
    return started.feeds[0].inventory() if started is not None and started.feeds is not None else []


async def follow(bench: EngineBench, view: CacheView, met: Any, *, rank: int = 0) -> None:
    """Read the engine's KV events until what they say is as expected."""
    async with asyncio.timeout(10):
        async for batch in bench.engine.kv_events(rank):
            view.apply(batch)
            view.numbers.append(batch.number)
            view.partial = batch.partial
            if met(view):
                return
