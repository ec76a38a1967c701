"""One of two real engines is killed under several streams: every one of them ends as it would have without that, and of the
engine no process is left.

What vLLM cannot continue in the middle (a grammar, penalties that count generated tokens only) ends as a typed error.
"""

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
from tests.support.running_up import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.fault, pytest.mark.timeout(400)]

ENGINES_START_S = 300.0
SEQUENCES = {"max_num_seqs": 16}  # all of them at once on the engine that is killed
TOKENS = 64
LONG = 4  # of `KINDS`: it surely takes all its tokens …
KILL_AFTER = 24  # … and somebody is killed after so many
TOGETHER = {"X-Session-ID": "all-of-them", "X-Headrace-Session-Affinity": "hard"}

# Each goes with its own question. What a stop string, a limit or a count would notice if tokens came twice or not at all.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2},
    {"stop": ["\n\n"], "extra_body": {"min_tokens": 40}},
    {"extra_body": {"ignore_eos": True}},
    {"extra_body": {"ignore_eos": True, "repetition_penalty": 1.3}},
    {"logit_bias": {"260": -100}, "extra_body": {"ignore_eos": True}},
    {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]},
)
# Each takes all its tokens, if nobody kills its engine.
NOT_CONTINUED: tuple[dict[str, Any], ...] = (
    {"extra_body": {"structured_outputs": {"regex": "[a-z ]{600,700}"}}},
    {"presence_penalty": 0.5, "extra_body": {"ignore_eos": True}},
    {"frequency_penalty": 0.5, "extra_body": {"ignore_eos": True}},
)


@dataclass
class Heard:
    """A whole answer, put together from a stream."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str | None] = field(default_factory=dict)
    tokens: list[tuple[str, float]] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)
    pieces: int = field(default=0, compare=False)

    def take(self, chunk: Any) -> None:
        self.pieces += 1
        for choice in chunk.choices:
            self.texts[choice.index] = self.texts.get(choice.index, "") + (choice.delta.content or "")
            self.finishes[choice.index] = choice.finish_reason or self.finishes.get(choice.index)
            if choice.logprobs is not None:
                self.tokens += [(entry.token, round(entry.logprob, 2)) for entry in choice.logprobs.content or []]
        if chunk.usage is not None:
            self.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[RunningUp]:
    flags = [f for name, value in {**ARGS, **SEQUENCES}.items() for f in ("--engine-arg", f"{name}={value}")]
    folder = tmp_path_factory.mktemp("two")
    up = RunningUp(
        folder,
        "--workers",
        "2",
        "--model",
        str(model_dir),
        "--served-name",
        "small",
        "--tool-parser",
        "hermes",
        *flags,
        engine="vllm",
    )
    try:
        up.until("ready", lambda: up.state()["ready"], ENGINES_START_S)
        up.until("both workers joined", lambda: len(holders(up)) == 2, ENGINES_START_S)
        yield up
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
    finally:
        up.stop()


def below(pid: int) -> list[int]:
    """The processes that this one has started."""
    return [int(child) for one in Path(f"/proc/{pid}/task").glob("*/children") for child in one.read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def ask(
    api: openai.AsyncOpenAI, number: int, kind: dict[str, Any], heard: Heard, midway: asyncio.Event | None = None
) -> Heard:
    options: Any = {
        "model": "small",
        "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_headers": TOGETHER,
        **kind,
    }
    async for chunk in await api.chat.completions.create(**options):
        heard.take(chunk)
        if midway is not None and heard.pieces == KILL_AFTER:
            midway.set()
    return heard


async def ask_for_the_impossible(api: openai.AsyncOpenAI, number: int, heard: Heard) -> str | None:
    """The code of the error that it ends with."""
    with pytest.raises(openai.APIError) as told:
        await ask(api, number, NOT_CONTINUED[number], heard)
    return told.value.code


async def test_streams_of_a_killed_engine_go_on_with_the_next_token_or_say_why_not(two: RunningUp) -> None:
    async with openai.AsyncOpenAI(base_url=f"{two.state()['url']}/v1", api_key="none", max_retries=0, timeout=200) as api:
        undisturbed = await asyncio.gather(*(ask(api, number, kind, Heard()) for number, kind in enumerate(KINDS)))
        heard, refused = [Heard() for _ in KINDS], [Heard() for _ in NOT_CONTINUED]
        midway = asyncio.Event()

        async def kill() -> int:
            await midway.wait()
            async with asyncio.timeout(60):
                while not all(one.pieces for one in refused):  # else they would start again, and end well
                    await asyncio.sleep(0.01)
            held = await asyncio.to_thread(holders, two)
            pid, runs = max(held.values(), key=lambda one: one[1])
            engine = below(pid)
            assert engine
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                while any(map(lives, engine)):
                    await asyncio.sleep(0.05)
            return runs

        async with asyncio.TaskGroup() as group:
            killing = group.create_task(kill())
            failing = [group.create_task(ask_for_the_impossible(api, n, one)) for n, one in enumerate(refused)]
            asking = [
                group.create_task(ask(api, n, kind, heard[n], midway if n == LONG else None)) for n, kind in enumerate(KINDS)
            ]
    assert killing.result() >= len(NOT_CONTINUED) + 1, "what should have been killed ran elsewhere"
    assert [task.result() for task in asking] == undisturbed
    assert [task.result() for task in failing] == ["resume_impossible"] * len(NOT_CONTINUED)
