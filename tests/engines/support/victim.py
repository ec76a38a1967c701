"""A worker process of which a test kills something: `python -m tests.engines.support.victim MODEL SETTINGS`.

It listens on a TCP port before its engine starts, as a worker does for its metrics. Prints one line per thing that happened:
`leader`, `started`, `died <reason>`, `refused`, `stopped`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import structlog

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Output, Sequence
from headrace.workers.errors import EngineDead
from headrace.workers.process_guard import TreeGuard
from headrace.workers.vllm.engine import VllmEngine
from tests.engines.conftest import ARGS


async def run(model: str, settings: dict[str, Any]) -> None:
    engine = VllmEngine()
    outputs: list[Output] = []
    await engine.start(EngineConfig(model=model, served_name="m", args=ARGS | settings), outputs.extend)
    print("started", flush=True)
    busy = Sampling(temperature=0.0, max_tokens=900, ignore_eos=True)
    await engine.submit(Sequence(id="busy", token_ids=[5, 6, 7], prompt_tokens=3, sampling=busy))
    async with asyncio.timeout(60):
        print("died", await engine.died(), flush=True)
    try:
        await engine.submit(Sequence(id="late", token_ids=[5, 6, 7], prompt_tokens=3, sampling=busy))
    except EngineDead:
        print("refused", flush=True)
    await engine.stop(2.0)
    print("stopped", json.dumps([output.fault is None for output in outputs if output.finish or output.fault]), flush=True)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    guard = TreeGuard()
    guard.start()
    print("leader", flush=True)
    with socket.create_server(("127.0.0.1", 0)):
        asyncio.run(run(sys.argv[1], json.loads(sys.argv[2])))
