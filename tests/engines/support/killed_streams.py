"""Streams of a worker whose engine is killed: each goes on with the next token, or ends with a typed error.

What an engine cannot continue in the middle (a grammar; with vLLM penalties that count generated tokens only) ends as a typed
error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.conftest import QUESTIONS
from tests.faults.test_workers_come_and_go import holders
from tests.support.up_process import RunningUp

SLOTS = 16  # of an engine that has all of them at once
TOKENS = 64
LONG = 4  # of `KINDS`: it surely takes all its tokens …
KILL_AFTER = 24  # … and the engine is killed after so many
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
# Each takes all its tokens, if its engine is not killed.
GUIDED: tuple[dict[str, Any], ...] = ({"extra_body": {"structured_outputs": {"regex": "[a-z ]{600,700}"}}},)
PENALIZED: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 0.5, "extra_body": {"ignore_eos": True}},
    {"frequency_penalty": 0.5, "extra_body": {"ignore_eos": True}},
)


@dataclass(frozen=True)
class Requests:
    """What is asked of an engine at once: kinds that go on after a kill, and kinds that end with a typed error."""

    continued: tuple[dict[str, Any], ...]
    refused: tuple[dict[str, Any], ...]


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


def lives(pid: int) -> bool:
    """Whether this process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def ask(
    api: openai.AsyncOpenAI, number: int, kind: dict[str, Any], heard: Heard, midway: asyncio.Event | None = None
) -> Heard:
    """Stream an answer into `heard`, and set `midway` when enough of it has come."""
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


async def ask_for_the_impossible(api: openai.AsyncOpenAI, number: int, kind: dict[str, Any], heard: Heard) -> str | None:
    """Stream an answer that cannot be continued, and return the code of the error that it ends with."""
    with pytest.raises(openai.APIError) as told:
        await ask(api, number, kind, heard)
    return told.value.code


async def undisturbed(api: openai.AsyncOpenAI, kinds: tuple[dict[str, Any], ...]) -> list[Heard]:
    """The answers to these kinds, all at once, on one worker that nothing happens to."""
    return await asyncio.gather(*(ask(api, number, kind, Heard()) for number, kind in enumerate(kinds)))


async def must_go_on(
    up: RunningUp, api: openai.AsyncOpenAI, requests: Requests, expected: list[Heard], kill: Callable[[int], list[int]]
) -> None:
    """Ask for all kinds at once and call `kill` with the process id of the worker that has them, in the middle of the answers.

    `kill` returns the processes of which none may be left; it must have them all before it kills one.
    """
    heard, refused = [Heard() for _ in requests.continued], [Heard() for _ in requests.refused]
    midway = asyncio.Event()

    async def kill_the_busy_one() -> int:
        await midway.wait()
        async with asyncio.timeout(60):
            while not all(one.pieces for one in refused):  # else they would start again, and end well
                await asyncio.sleep(0.01)
        held = await asyncio.to_thread(holders, up)
        pid, runs = max(held.values(), key=lambda one: one[1])
        processes = await asyncio.to_thread(kill, pid)
        assert processes
        async with asyncio.timeout(30):
            while any(map(lives, processes)):
                await asyncio.sleep(0.05)
        return runs

    async with asyncio.TaskGroup() as group:
        killing = group.create_task(kill_the_busy_one())
        failing = [
            group.create_task(ask_for_the_impossible(api, n, kind, refused[n])) for n, kind in enumerate(requests.refused)
        ]
        asking = [
            group.create_task(ask(api, n, kind, heard[n], midway if n == LONG else None))
            for n, kind in enumerate(requests.continued)
        ]
    assert killing.result() > len(refused), "what should have been killed ran elsewhere"
    for kind, task, one in zip(requests.continued, asking, expected, strict=True):
        assert task.result() == one, kind
    assert [task.result() for task in failing] == ["resume_impossible"] * len(refused)
