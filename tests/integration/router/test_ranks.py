"""A worker whose engine has two data-parallel ranks: a router sends requests to the rank that has their prefix.

The engine is TensorRT-LLM's adapter on the stand-in package with attention data parallelism; everything else is real.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.broker.part_state import PartState
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.router.main import RouterProcess, builder
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.settings import RouterOptions
from headrace.workers.settings import WorkerSettings
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.support.local_deployment import serving


def worker(folder: Path) -> WorkerSettings:
    return WorkerSettings(
        engine="trtllm",
        model=str(folder),
        served_name="m",
        engine_args={"max_batch_size": 8, "tensor_parallel_size": 2, "enable_attention_dp": True},
        tool_parser="none",
        reasoning_parser="none",
        drain_grace_s=0.0,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nats_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncOpenAI]:
    subjects = Subjects(f"ranks{os.getpid()}")
    folder = stand_in.model_folder(tmp_path_factory.mktemp("trtllm"))
    with stand_in.installed():
        async with (
            serving(nats_server, subjects, worker(folder)) as running,
            await Connection.connect(ConnectOptions(servers=(nats_server.url,), name="router"), subjects=subjects) as link,
            AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made,
        ):
            options = RouterOptions()
            process = RouterProcess(link, subjects, options, builder(options, SchedulerSettings()), PartState("router"))
            routing = asyncio.create_task(process.run())
            async with asyncio.timeout(20):
                while not any(session.ready for session in process.sessions.values()):
                    await asyncio.sleep(0.02)
            yield made
            routing.cancel()
            await asyncio.wait([routing])


async def ask(client: AsyncOpenAI, n: int) -> tuple[dict[str, Any], int]:
    """The decision about prompt number `n`, and the tokens of it that the engine had cached."""
    content = f"{n} rivers and {n} stones, told at some length. " * 12
    raw = await client.chat.completions.with_raw_response.create(
        model="m",
        messages=[{"role": "user", "content": content}],
        max_tokens=2,
        extra_headers={"X-Headrace-Explain": "1"},
    )
    details = raw.parse().usage.prompt_tokens_details
    return json.loads(raw.headers["x-headrace-decision"]), details.cached_tokens if details is not None else 0


def device_blocks(decision: dict[str, Any]) -> dict[str, int]:
    return {one["worker"].rpartition("~")[2]: one.get("device", 0) for one in decision["candidates"]}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_goes_again_to_the_rank_that_has_it_and_finds_it_there(client: AsyncOpenAI) -> None:
    first = {n: (await ask(client, n))[0]["worker"] for n in range(6)}
    assert {place.rpartition("~")[2] for place in first.values()} == {"0", "1"}, "both ranks get work"
    for n, place in first.items():
        rank = place.rpartition("~")[2]
        async with asyncio.timeout(10):
            while True:
                decision, cached = await ask(client, n)
                if max(device_blocks(decision).values()) >= 3:  # its own have been announced, not only what all prompts share
                    break
        held = device_blocks(decision)
        assert held[rank] > held["1" if rank == "0" else "0"]
        assert decision["worker"] == place
        assert cached >= 64, "the engine computed it on that rank"
