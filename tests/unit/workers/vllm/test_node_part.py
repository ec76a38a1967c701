"""The part of an engine that a node other than the first computes: what it is asked for by, and when it ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("zmq")  # comes with vLLM

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineDead
from headrace.workers.main import follow
from headrace.workers.vllm import engine as engine_module
from headrace.workers.vllm.engine import VllmEngine
from headrace.workers.vllm.node_part import NODE_GONE, PROCESS_GONE, NodePart, follows
from tests.support.runtime_bench import INFO


def config(**args: Any) -> EngineConfig:
    return EngineConfig(model="m", served_name="m", args=args)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, False),
        ({"nnodes": 2}, False),
        ({"nnodes": 2, "node_rank": 0}, False),
        ({"nnodes": 2, "node_rank": 1}, True),
        ({"nnodes": 1, "node_rank": 0}, False),
    ],
)
def test_only_a_node_after_the_first_follows(args: dict[str, Any], expected: bool) -> None:
    assert follows(config(**args)) is expected


class FirstNode:
    """The store of the first node: takes connections, and says nothing."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: list[asyncio.StreamWriter] = []
        self.met = asyncio.Event()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _meet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.append(writer)
        self.met.set()

    def end(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.close()


@pytest_asyncio.fixture
async def first() -> AsyncIterator[FirstNode]:
    made = FirstNode()
    await made.start()
    yield made
    made.end()


@pytest.fixture
def process() -> Iterator[tuple[int, int]]:
    """A process's sentinel, and what ends the process when it is closed."""
    sentinel, life = os.pipe()
    yield sentinel, life
    os.close(sentinel)


def part(first: FirstNode, sentinel: int) -> NodePart:
    workers = [SimpleNamespace(proc=SimpleNamespace(sentinel=sentinel))]
    return NodePart(SimpleNamespace(workers=workers, shutdown=lambda: None), INFO, ("127.0.0.1", first.port))


async def test_it_ends_with_the_first_node(first: FirstNode, process: tuple[int, int]) -> None:
    watching = asyncio.create_task(part(first, process[0]).watch())
    async with asyncio.timeout(10):
        await first.met.wait()
        assert not watching.done()
        first.end()
        assert await watching == NODE_GONE
    os.close(process[1])


async def test_it_ends_with_its_own_processes(first: FirstNode, process: tuple[int, int]) -> None:
    watching = asyncio.create_task(part(first, process[0]).watch())
    async with asyncio.timeout(10):
        await first.met.wait()
        os.close(process[1])
        assert await watching == PROCESS_GONE


async def test_a_first_node_that_cannot_be_reached_is_gone(first: FirstNode, process: tuple[int, int]) -> None:
    first.end()
    async with asyncio.timeout(10):
        assert (await part(first, process[0]).watch()).startswith(NODE_GONE)
    os.close(process[1])


async def test_a_worker_of_such_a_node_starts_its_part_and_no_engine(
    first: FirstNode, process: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = part(first, process[0])

    async def start_part(config: EngineConfig) -> NodePart:
        return made

    monkeypatch.setattr(engine_module, "start_part", start_part)
    engine = VllmEngine()
    assert await engine.start(config(nnodes=2, node_rank=1), lambda outputs: None) is INFO
    async with asyncio.timeout(10):
        following = asyncio.create_task(follow(engine, INFO))
        await first.met.wait()
        first.end()
        with pytest.raises(EngineDead, match="first node"):
            await following
        await engine.stop(0.0)
    os.close(process[1])
