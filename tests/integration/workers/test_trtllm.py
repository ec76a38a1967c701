"""A deployment whose workers run TensorRT-LLM's adapter on the stand-in package, from HTTP to tokens and back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.settings import WorkerSettings
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.support.local_deployment import Serving, serving

ANSWER = {"model": "m", "temperature": 0.0, "max_tokens": 24}
MESSAGES = [{"role": "user", "content": "Tell me about rivers and stones, at some length, please. " * 6}]


def worker(folder: Path, **args: Any) -> WorkerSettings:
    return WorkerSettings(
        engine="trtllm",
        model=str(folder),
        served_name="m",
        engine_args={"max_batch_size": 8, **args},
        tool_parser="none",
        reasoning_parser="none",
        drain_grace_s=0.0,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = stand_in.model_folder(tmp_path_factory.mktemp("trtllm"))
    with stand_in.installed():
        args = {"model_kwargs": {"stand_in": {"timing": "cpu-small"}}}
        async with serving(
            nats_server, Subjects(f"trt{os.getpid()}"), worker(folder, **args), worker(folder, **args)
        ) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(deployment: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_is_answered_whole_and_streamed_with_the_same_text(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(messages=MESSAGES, **ANSWER)
    stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **ANSWER)
    text = "".join([event.choices[0].delta.content or "" async for event in stream])
    assert text == whole.choices[0].message.content
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 24)


@pytest.mark.asyncio(loop_scope="module")
async def test_structured_output_and_log_probabilities_are_served(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        messages=MESSAGES,
        extra_body={"structured_outputs": {"choice": ["river", "stone"]}},
        logprobs=True,
        top_logprobs=2,
        **ANSWER,
    )
    assert answer.choices[0].message.content in ("river", "stone")
    assert answer.choices[0].logprobs.content[0].logprob == -0.25


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_goes_on_exactly_when_its_worker_leaves(deployment: Serving, client: AsyncOpenAI) -> None:
    options = ANSWER | {"max_tokens": 120}
    whole = await client.chat.completions.create(messages=MESSAGES, **options)
    stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **options)
    text, left = "", False
    async for event in stream:
        text += event.choices[0].delta.content or ""
        if len(text) > 100 and not left:
            left = True
            next(iter(deployment._workers)).cancel()
    assert left
    assert text == whole.choices[0].message.content
