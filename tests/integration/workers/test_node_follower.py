"""A worker of a node after the first of an engine of several nodes: no requests, its own metrics, and one end with its part.

A stand-in takes the place of SGLang's process: several nodes with a real SGLang cannot be had here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog

pytest.importorskip("zmq")  # comes with the engines

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers import main as workers_main
from headrace.workers.errors import EngineDead
from headrace.workers.settings import WorkerSettings
from headrace.workers.sglang import messages
from headrace.workers.sglang.engine import SglangEngine

ROOT = Path(__file__).parents[3]
SECOND_NODE = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5000", "tp_size": 2}


@contextlib.asynccontextmanager
async def following(
    server: EmbeddedServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[SglangEngine, asyncio.Task[None]]]:
    """A worker that follows, when it says so; nothing is registered meanwhile."""
    monkeypatch.setattr(messages, "_COMMAND", ("-P", str(ROOT / "tests" / "support" / "sglang_child_stand_in.py")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    engine, subjects = SglangEngine(), Subjects(name)
    monkeypatch.setattr(workers_main, "create", lambda _: engine)
    settings = WorkerSettings(engine="sglang", model="m", engine_args=SECOND_NODE, tool_parser="none", reasoning_parser="none")
    options = ConnectOptions(servers=(server.url,))
    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(workers_main.run_worker(settings, options, subjects))
        try:
            await until(lambda: task.done() or any(log["event"] == "worker.follows" for log in logs))
            if task.done():
                task.result()
            async with await Connection.connect(options, subjects=subjects) as connection:
                assert await connection.bucket(subjects.bucket("members")).entries("worker.>") == []
                assert await connection.bucket(subjects.bucket("models")).entries() == []
            yield engine, task
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():
            await asyncio.sleep(0.01)


async def test_it_stops_in_good_order_and_leaves_no_process(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(nats_server, f"fol{os.getpid()}", monkeypatch) as (engine, task):
        child = engine.child_pid
        assert child is not None
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await task
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


async def test_it_ends_with_its_part_of_the_engine(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following(nats_server, f"fod{os.getpid()}", monkeypatch) as (engine, task):
        assert engine.child_pid is not None
        os.kill(engine.child_pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await task
