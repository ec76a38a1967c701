"""One of two real engines is killed under several streams: every one of them ends as it would have without that."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.conftest import ARGS, QUESTIONS
from tests.faults.test_workers_come_and_go import holders
from tests.running_up import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.fault, pytest.mark.timeout(400)]

ENGINES_START_S = 300.0
TOKENS = 96
LONG = 4  # of `KINDS`: it surely takes all its tokens …
KILL_AFTER = 24  # … and somebody is killed after so many

# Each goes with its own question. What a stop string, a limit or a count would notice if tokens came twice or not at all.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2},
    {"stop": ["\n\n"], "extra_body": {"min_tokens": 40}},
    {"extra_body": {"ignore_eos": True}},
    {"extra_body": {"ignore_eos": True, "repetition_penalty": 1.3}},
)


@dataclass
class Heard:
    """A whole answer, put together from a stream."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str | None] = field(default_factory=dict)
    tokens: list[tuple[str, float]] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)

    def take(self, chunk: Any) -> None:
        for choice in chunk.choices:
            self.texts[choice.index] = self.texts.get(choice.index, "") + (choice.delta.content or "")
            self.finishes[choice.index] = choice.finish_reason or self.finishes.get(choice.index)
            if choice.logprobs is not None:
                self.tokens += [(entry.token, round(entry.logprob, 2)) for entry in choice.logprobs.content or []]
        if chunk.usage is not None:
            self.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[RunningUp]:
    flags = [f for name, value in ARGS.items() for f in ("--engine-arg", f"{name}={value}")]
    folder = tmp_path_factory.mktemp("two")
    up = RunningUp(folder, "--workers", "2", "--model", str(model_dir), "--served-name", "small", *flags, engine="vllm")
    try:
        up.until("ready", lambda: up.state()["ready"], ENGINES_START_S)
        up.until("both workers joined", lambda: len(holders(up)) == 2, ENGINES_START_S)
        yield up
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
    finally:
        up.stop()


async def ask(api: openai.AsyncOpenAI, number: int, midway: asyncio.Event | None = None) -> Heard:
    heard, pieces = Heard(), 0
    options: Any = {
        "model": "small",
        "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **KINDS[number],
    }
    async for chunk in await api.chat.completions.create(**options):
        heard.take(chunk)
        pieces += 1
        if midway is not None and pieces == KILL_AFTER:
            midway.set()
    return heard


async def test_streams_of_a_killed_engine_go_on_with_the_next_token(two: RunningUp) -> None:
    async with openai.AsyncOpenAI(base_url=f"{two.state()['url']}/v1", api_key="none", max_retries=0, timeout=200) as api:
        undisturbed = [await ask(api, number) for number in range(len(KINDS))]
        midway = asyncio.Event()

        async def kill() -> int:
            await midway.wait()
            held = await asyncio.to_thread(holders, two)
            pid, runs = max(held.values(), key=lambda one: one[1])
            os.kill(pid, signal.SIGKILL)
            return runs

        async with asyncio.TaskGroup() as group:
            killing = group.create_task(kill())
            asking = [group.create_task(ask(api, n, midway if n == LONG else None)) for n in range(len(KINDS))]
    assert killing.result() > 0, "nothing ran on the engine that was killed"
    assert [task.result() for task in asking] == undisturbed
