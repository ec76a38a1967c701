"""Every option of every API, with the worker killed under the answer: equal to the undisturbed one, field by field.

All requests run at once on one slow worker, which is killed once they are under way; another one takes them all over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.jetstream.errors import JetStreamError
from tests.faults.support.answers import Pieces, ask
from tests.faults.test_engine_and_broker_faults import another_worker
from tests.faults.test_workers_come_and_go import holders
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

UNDER_WAY = 12  # pieces of a stream, before the worker is killed
PARSERS = ("--tool-parser", "hermes", "--reasoning-parser", "think")
SLOW = ("--engine-arg", 'timing_overrides={"decode_base_s": 0.04}', "--engine-arg", "slots=128")

CITIES = [f"city number {n} of the long list, é and 🙂 included" for n in range(12)]
WEATHER = {
    "name": "weather",
    "description": "The weather in cities",
    "parameters": {
        "type": "object",
        "properties": {
            "cities": {"type": "array", "items": {"type": "string"}, "minItems": 25, "maxItems": 30},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["cities", "unit"],
    },
}
TOOL = {"type": "function", "function": WEATHER}
SCHEMA = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"type": "integer"}, "minItems": 60}, "ok": {"type": "boolean"}},
    "required": ["rows", "ok"],
}  # fmt: skip
WORDS = " ".join(f"word{n} and more of it," for n in range(40))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"cities": %s, "unit": "C"}}\n</tool_call>'
CALLS = "Let me look. " + "\n".join(CALL % str(CITIES[at:]).replace("'", '"') for at in (0, 5))
THOUGHT = f"<think>{WORDS}</think>The answer is: {WORDS}"


def said(text: str) -> dict[str, Any]:
    """Have the simulator answer with this."""
    return {"vllm_xargs": {"sim_answer": text}}


def chat(question: str, **options: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 150, **options}
    return "/v1/chat/completions", body


def completion(at: int, **options: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": list(range(at, at + 40)), "temperature": 0, "max_tokens": 150, **options}


def response(**options: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": "What is it like?", "max_output_tokens": 600, "store": False, **options}


def message(question: str, **options: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [{"role": "user", "content": question}], "max_tokens": 600, **options}


LONG = {"ignore_eos": True}
NAMED = {"type": "function", "function": {"name": "weather"}}
THINKING = {"type": "enabled", "budget_tokens": 1024}
USABLE = [{"name": "weather", "input_schema": WEATHER["parameters"]}]
KEPT = {"stop": ["word30 and"], "include_stop_str_in_output": True}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "table", "schema": SCHEMA}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat("Plain?", **LONG),
    "chat, n": chat("Several?", n=3, temperature=1, seed=7, **LONG),
    "chat, logprobs": chat("How sure?", logprobs=True, top_logprobs=3, **LONG),
    "chat, n and logprobs": chat("How sure of each?", n=2, temperature=1, seed=3, logprobs=True, top_logprobs=2, **LONG),
    "chat, stop string": chat("Until when?", stop=["word33 and"], max_tokens=600, **said(WORDS)),
    "chat, stop string that is kept": chat("And then?", max_tokens=600, **KEPT, **said(WORDS)),
    "chat, penalties": chat("Again?", presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.2, **LONG),
    "chat, min_tokens": chat("At least?", min_tokens=120, max_tokens=140, **said("It is short.")),
    "chat, max_tokens": chat("At most?", max_tokens=90, **said(WORDS)),
    "chat, bias": chat("Which?", logit_bias={"500": 5, "600": -100}, **LONG),
    "chat, reasoning": chat("Why?", max_tokens=1500, **said(THOUGHT)),
    "chat, tool calls": chat("Weather?", tools=[TOOL], max_tokens=1500, **said(CALLS)),
    "chat, a named tool": chat("This one?", tools=[TOOL], tool_choice=NAMED, max_tokens=900),
    "chat, structured output": chat("A table?", response_format=JSON_SCHEMA, max_tokens=900),
    "completion": completion(300, **LONG),
    "completion, n and stop": completion(350, n=2, temperature=1, seed=5, stop=[" and"], **LONG),
    "completion, logprobs and echo": completion(400, logprobs=2, echo=True, **LONG),
    "completion, two prompts": completion(450, prompt=[list(range(450, 480)), list(range(480, 520))], **LONG),
    "completion, a pattern": completion(500, structured_outputs={"regex": "[a-z]{150,160}"}, max_tokens=900),
    "response": response(**said(WORDS)),
    "response, tool calls": response(tools=[{"type": "function", **WEATHER}], max_output_tokens=1500, **said(CALLS)),
    "response, structured output": response(text={"format": {"type": "json_schema", "name": "table", "schema": SCHEMA}}),
    "message, thinking": message("Think?", thinking=THINKING, max_tokens=1500, **said(THOUGHT)),
    "message, tool use": message("Use?", tools=USABLE, max_tokens=1500, **said(CALLS)),
    "message": message("Say?", stop_sequences=["word36 and"], **said(WORDS)),
}  # fmt: skip
_STREAM_USAGE = {"/v1/chat/completions", "/v1/completions"}


def bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every case, streamed and whole."""
    found = {}
    for name, (path, body) in CASES.items():
        extra = {"stream_options": {"include_usage": True}} if path in _STREAM_USAGE else {}
        found[name] = (path, {"model": "sim", **body})
        found[f"{name}, streamed"] = (path, {"model": "sim", "stream": True, **extra, **body})
    return found


@contextlib.asynccontextmanager
async def http(up: RunningUp) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=200)
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
    async with httpx.AsyncClient(base_url=up.state()["url"], timeout=90, limits=limits, headers=headers) as client:
        yield client


async def all_at_once(up: RunningUp, midway: Callable[[dict[str, Pieces]], Any] | None = None) -> dict[str, Any]:
    pieces = {name: Pieces() for name in bodies()}
    async with http(up) as client, asyncio.TaskGroup() as group:
        if midway is not None:
            group.create_task(midway(pieces))
        asked = {name: group.create_task(ask(client, path, body, pieces[name])) for name, (path, body) in bodies().items()}
    return {name: task.result() for name, task in asked.items()}


async def until(what: str, met: Callable[[], bool]) -> None:
    def is_so() -> bool:
        with contextlib.suppress(JetStreamError):  # its streams are not made yet
            return met()
        return False

    try:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(is_so):
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not in time: {what}")


async def test_an_answer_is_the_same_whatever_was_asked_for_when_its_worker_is_killed(tmp_path: Path) -> None:
    up = RunningUp(tmp_path, "--workers", "0")
    children: list[subprocess.Popen[bytes]] = []

    def worker(name: str, *flags: str) -> None:
        children.append(another_worker(up, tmp_path, name, "--drain-grace", "0", *PARSERS, *flags))

    def alone(name: str) -> bool:
        return [worker.rpartition("-")[0] for worker in holders(up)] == [name] and up.state()["ready"]

    try:
        up.until("the frontend runs", lambda: bool(up.state()["frontend"]["pid"]))
        worker("quick")
        await until("there is a worker", lambda: alone("quick"))
        undisturbed = await all_at_once(up)
        os.kill(children[0].pid, signal.SIGSTOP)  # out of the way until it is to take over
        worker("slow", *SLOW)
        await until("only the slow worker is there", lambda: alone("slow"))
        held: list[int] = []

        async def kill(pieces: dict[str, Pieces]) -> None:
            last = pieces[list(pieces)[-1]]
            await until("all are under way", lambda: min(last.count, pieces["chat, streamed"].count) >= UNDER_WAY)
            os.kill(children[0].pid, signal.SIGCONT)
            await until("the heir is there", lambda: len(holders(up)) == 2)
            found = await asyncio.to_thread(holders, up)
            held.extend(runs for name, (_, runs) in found.items() if name.startswith("slow"))
            os.kill(children[1].pid, signal.SIGKILL)

        disturbed = await all_at_once(up, kill)
    finally:
        for child in children:
            child.kill()
            child.wait()
        up.stop()
    prompts = sum(2 if "two prompts" in name else 1 for name in bodies())
    assert held == [prompts], "all of them ran on the worker that was killed"
    for name, answer in disturbed.items():
        assert answer == undisturbed[name], name
