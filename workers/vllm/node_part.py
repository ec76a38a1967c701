"""Runs the part of an engine over several nodes that a node other than the first computes: vLLM's worker processes alone.

The worker of node 0 has the scheduler and serves. This one starts what vLLM's own program starts with `--headless`, and ends
when one of these processes ends, or node 0: vLLM's processes wait for that one for ever. A connection to the store at which
the nodes meet (`master_addr`, `master_port`) is open as long as node 0 computes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

import structlog

from headrace.workers.blocking import run_in_thread
from headrace.workers.engine import EngineConfig, EngineInfo
from headrace.workers.errors import UnsupportedByEngine
from headrace.workers.kit import node_part, not_installed, starting
from headrace.workers.vllm.settings import engine_args, prepare_environment

_log = structlog.get_logger()

NODE_GONE = "the first node of this engine is gone"
PROCESS_GONE = "a process of this node's part of the engine is gone; its own log lines say why"
CONNECT_S = 10.0
ALIVE_AFTER_S, ALIVE_EVERY_S, ALIVE_TRIES = 10, 5, 3  # a machine that fell silent is noticed in 25 s
STOP_S = 10.0


def follows(config: EngineConfig) -> bool:
    """Return whether the settings are those of a node that computes for the first node of its engine."""
    return int(config.args.get("nnodes") or 1) > 1 and int(config.args.get("node_rank") or 0) > 0


class NodePart:
    """The part of an engine that this node computes. `watch` runs until the part ends."""

    def __init__(self, executor: Any, info: EngineInfo, first_node: tuple[str, int]) -> None:
        self._executor = executor
        self.info = info
        self._first_node = first_node

    async def watch(self) -> str:
        """Return why the part has ended, once it has."""
        parts = [asyncio.create_task(self._processes()), asyncio.create_task(_gone(*self._first_node))]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            return next(task.result() for task in parts if task in done)
        finally:
            for task in parts:
                task.cancel()

    async def _processes(self) -> str:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        sentinels = [worker.proc.sentinel for worker in self._executor.workers]
        for sentinel in sentinels:
            loop.add_reader(sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            for sentinel in sentinels:
                loop.remove_reader(sentinel)
        return PROCESS_GONE

    async def stop(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.to_thread(self._executor.shutdown)


async def start_part(config: EngineConfig) -> NodePart:
    """Start this node's part, and wait until the whole engine has met. Raises EngineStartFailed."""
    prepare_environment(config, os.environ)
    executor, info, first_node = await run_in_thread(lambda: _build(config), name="vllm-start")
    return NodePart(executor, info, first_node)


def _build(config: EngineConfig) -> tuple[Any, EngineInfo, tuple[str, int]]:
    try:
        import vllm
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    except ImportError as error:
        raise not_installed("vLLM", error, "`make install ENGINE=vllm`") from error
    with starting("vLLM's part on this node", config.model):
        vllm_config = engine_args(config).create_engine_config(headless=True)
        parallel = vllm_config.parallel_config
        if parallel.node_rank_within_dp == 0:
            raise UnsupportedByEngine("data-parallel ranks of a node of their own are workers of their own, without nnodes")
        executor = MultiprocExecutor(vllm_config, monitor_workers=False)
    info = node_part(
        "vllm",
        vllm.__version__,
        context_length=vllm_config.model_config.max_model_len,
        block_size=vllm_config.cache_config.block_size,
        blocks=0,
        node_rank=parallel.node_rank,
    )
    return executor, info, (parallel.master_addr, parallel.master_port)


async def _gone(host: str, port: int) -> str:
    """Return once the store of the first node is gone. Nothing is ever said to it."""
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        return f"{NODE_GONE}: {error}"
    try:
        made: socket.socket = writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", ALIVE_AFTER_S),
            ("TCP_KEEPINTVL", ALIVE_EVERY_S),
            ("TCP_KEEPCNT", ALIVE_TRIES),
        ):
            if hasattr(socket, name):  # not everywhere
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with suppress(OSError):
            while await reader.read(4096):
                pass
    finally:
        writer.close()
    return NODE_GONE
