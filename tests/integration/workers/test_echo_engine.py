"""The engine of examples/ serves requests from HTTP to its tokens and back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from examples.echo_engine import EOS, EchoEngine
from headrace.base.errors import EXIT_CONFIGURATION
from headrace.broker.messages.requests import Sampling
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.engine import EngineConfig, Output, Sequence
from headrace.workers.settings import WorkerSettings
from tests.support.local_deployment import serving
from tests.support.up_process import RunningUp

EXAMPLES = Path(__file__).parents[3] / "examples"
TEXT = "The quick brown fox jumps over 13 lazy dogs; naïve café ☕."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nats_server: EmbeddedServer) -> AsyncIterator[AsyncOpenAI]:
    settings = WorkerSettings(
        engine="examples.echo_engine:EchoEngine",
        model="echo",
        served_name="echo",
        engine_args={"step_s": 0.0},
        drain_grace_s=0.0,
    )
    async with (
        serving(nats_server, Subjects(f"echo{os.getpid()}"), settings) as running,
        AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


async def chat(client: AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(model="echo", messages=[{"role": "user", "content": TEXT}], **options)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_is_answered_with_its_last_message(client: AsyncOpenAI) -> None:
    answer = await chat(client)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == answer.usage.prompt_tokens + 1  # the end token


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_says_the_same(client: AsyncOpenAI) -> None:
    stream = await chat(client, stream=True)
    assert "".join([event.choices[0].delta.content or "" async for event in stream]) == TEXT


@pytest.mark.asyncio(loop_scope="module")
async def test_the_length_and_stop_strings_are_obeyed(client: AsyncOpenAI) -> None:
    short = await chat(client, max_tokens=3)
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (3, "length")
    stopped = await chat(client, stop="jumps")
    assert stopped.choices[0].message.content == TEXT[: TEXT.index("jumps")]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_completion_goes_round_when_the_end_is_ignored(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="echo", prompt=[5, 6, 7], max_tokens=7, extra_body={"ignore_eos": True})
    again = await client.completions.create(model="echo", prompt=[5, 6, 7, 5, 6, 7, 5], max_tokens=7)
    assert answer.choices[0].text == again.choices[0].text


@pytest.mark.asyncio(loop_scope="module")
async def test_a_resumed_sequence_goes_on_behind_what_was_emitted() -> None:
    engine, outputs = EchoEngine(), list[Output]()
    ended = asyncio.Event()

    def sink(step: list[Output]) -> None:
        outputs.extend(step)
        if outputs[-1].finish is not None:
            ended.set()

    await engine.start(EngineConfig(model="echo", served_name="echo"), sink)
    await engine.submit(Sequence(id="s", token_ids=[5, 6, 7, 5], prompt_tokens=3, sampling=Sampling(max_tokens=9)))
    await asyncio.wait_for(ended.wait(), 5)
    await engine.stop(1.0)
    assert [output.ids for output in outputs] == [[6], [7], [EOS]]


@pytest.mark.asyncio(loop_scope="module")
async def test_more_requests_than_slots_are_all_answered(client: AsyncOpenAI) -> None:
    answers = await asyncio.gather(*(chat(client) for _ in range(40)))
    assert {answer.choices[0].message.content for answer in answers} == {TEXT}


@pytest.mark.deployment
def test_headrace_up_runs_it_and_says_what_is_wrong_with_one_that_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=os.pathsep)
    up = RunningUp(tmp_path, engine="echo_engine:EchoEngine")
    try:
        up.until_ready()
        assert up.chat() == "Say hello."
    finally:
        up.stop()
    failing = subprocess.run(
        [sys.executable, "-P", "-m", "headrace", "up", "--engine", "echo_engine:Missing", "--port", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert failing.returncode == EXIT_CONFIGURATION
    assert "module 'echo_engine' has no attribute 'Missing'" in failing.stdout + failing.stderr
