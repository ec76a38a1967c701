"""Prefill and decode apart with TensorRT-LLM's adapter, over a real nats-server, and the death of either side.

The engines are the stand-in package: a context-only request, its opaque state, a generation-only request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from openai import AsyncOpenAI
from prometheus_client import REGISTRY

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.settings import WorkerSettings
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.support.local_deployment import Serving, serving

ANSWER: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}


def worker(folder: Path, name: str, role: str) -> WorkerSettings:
    apart = {"cache_transceiver_config": {"backend": "UCX"}, "disable_overlap_scheduler": True} if role != "aggregated" else {}
    return WorkerSettings(
        engine="trtllm",
        model=str(folder),
        served_name=name,
        role=role,  # type: ignore[arg-type]
        prefill="always",
        engine_args={"max_batch_size": 8, "model_kwargs": {"stand_in": {"timing": "cpu-small"}}, **apart},
        tool_parser="none",
        reasoning_parser="none",
        drain_grace_s=0.0,
    )


class Deployment:
    """A pool `apart` of a prefill worker and decode workers, and a pool `whole` of one worker with the same model."""

    def __init__(self, running: Serving, client: AsyncOpenAI, folder: Path) -> None:
        self.running = running
        self.client = client
        self.folder = folder
        self.tasks: dict[str, list[asyncio.Task[None]]] = {"prefill": [], "decode": []}

    async def start(self, role: str) -> None:
        self.tasks[role].append(await self.running.start(worker(self.folder, "apart", role)))

    async def text(self, model: str, n: int) -> str:
        answer = await self.client.chat.completions.create(model=model, messages=messages(n), **ANSWER)
        return answer.choices[0].message.content or ""


def messages(n: int) -> Any:
    return [{"role": "user", "content": f"{n} rivers and {n} stones, told at some length, please. " * 8}]


def remote() -> float:
    value = REGISTRY.get_sample_value("headrace_worker_prefills_total", {"where": "remote", "reason": "always"})
    return value or 0.0


def failures() -> float:
    """Prompts that another worker was to compute and did not."""
    metric = next(one for one in REGISTRY.collect() if one.name == "headrace_worker_prefill_failures")
    return sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))


@pytest_asyncio.fixture
async def deployment(nats_server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Deployment]:
    folder = stand_in.model_folder(tmp_path / "model")
    subjects = Subjects(f"trtpd{os.getpid()}x{tmp_path.name[-4:].replace('.', '')}")
    with stand_in.installed():
        async with (
            serving(nats_server, subjects, worker(folder, "whole", "aggregated")) as running,
            AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
        ):
            made = Deployment(running, client, folder)
            await made.start("decode")
            await made.start("prefill")
            before, n = remote(), 100
            async with asyncio.timeout(20):
                while remote() == before:  # until the decode worker has seen the lease of the prefill worker
                    await made.text("apart", n)
                    n += 1
            yield made


async def test_a_prompt_computed_elsewhere_gets_the_text_of_one_engine(deployment: Deployment) -> None:
    before = remote()
    for n in range(3):
        assert await deployment.text("apart", n) == await deployment.text("whole", n)
    assert remote() >= before + 3


async def test_when_the_prefill_worker_dies_its_prompts_are_computed_where_they_are_answered(deployment: Deployment) -> None:
    whole = [await deployment.text("whole", n) for n in range(6)]
    asked = [asyncio.create_task(deployment.text("apart", n)) for n in range(6)]
    before, failed = remote(), failures()
    async with asyncio.timeout(20):
        while remote() < before + 3:
            await asyncio.sleep(0.005)
    deployment.tasks["prefill"][0].cancel()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*asked) == whole
        assert failures() > failed, "it died with prompts of others"
        assert await deployment.text("apart", 7) == await deployment.text("whole", 7)


async def test_when_a_decode_worker_dies_another_goes_on_with_its_answers(deployment: Deployment) -> None:
    await deployment.start("decode")
    options = ANSWER | {"max_tokens": 120}
    whole = await deployment.client.chat.completions.create(model="whole", messages=messages(1), **options)
    streams = [
        await deployment.client.chat.completions.create(model="apart", messages=messages(1), stream=True, **options)
        for _ in range(4)
    ]

    async def read(stream: Any) -> str:
        text = ""
        async for event in stream:
            text += event.choices[0].delta.content or ""
            if len(text) > 60 and not deployment.tasks["decode"][0].cancelling():
                deployment.tasks["decode"][0].cancel()
        return text

    async with asyncio.timeout(60):
        texts = await asyncio.gather(*(read(stream) for stream in streams))
    assert deployment.tasks["decode"][0].cancelling()
    assert set(texts) == {whole.choices[0].message.content}
