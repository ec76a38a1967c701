"""The whole of Headrace in one process over one small vLLM that takes images or sounds, beside the same vLLM asked directly.

What it is asked directly goes through vLLM's own way from messages to answer: its template handling, its fetching and decoding,
its names for items.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

import headrace.workers.kv.publisher
import headrace.workers.main
import tests.support.local_deployment
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.engine import Output, Sequence
from headrace.workers.kv.translator import Translator
from headrace.workers.runtime.runtime import Runtime
from headrace.workers.settings import WorkerSettings
from tests.support.local_deployment import Serving, serving, sim

BLIND = "blind"
START_S = 500.0
ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 8}
LONG = "The sea was calm that evening and nobody on the pier said a word. " * 4


@dataclass
class Parts:
    """What one worker is made of, taken while it starts."""

    engine: Any = None
    runtimes: list[Runtime] = field(default_factory=list)
    translators: list[Translator] = field(default_factory=list)


@dataclass
class World:
    model: str
    serving: Serving
    client: httpx.AsyncClient
    parts: Parts
    subjects: Subjects

    @property
    def llm(self) -> Any:
        return self.parts.engine.llm

    async def post(self, content: list[dict[str, Any]], **options: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 12,
            "return_token_ids": True,
            **options,
        }
        return await self.client.post("/v1/chat/completions", json=body)

    async def ask(self, *content: dict[str, Any], **options: Any) -> dict[str, Any]:
        answer = await self.post(list(content), **options)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def directly(self, *content: dict[str, Any]) -> tuple[list[int], list[int], str]:
        """(prompt, answer, its text) of vLLM alone."""
        from vllm import SamplingParams
        from vllm.renderers import ChatParams

        wanted = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        _, (prompt,) = await self.llm.renderer.render_chat_async([[{"role": "user", "content": list(content)}]], wanted)
        name = f"direct-{os.urandom(4).hex()}"
        async for made in self.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12), name):
            last = made
        return last.prompt_token_ids, list(last.outputs[0].token_ids), last.outputs[0].text

    async def submit(self, sequence: Sequence) -> list[Output]:
        """Straight to the worker's engine."""
        ended, outputs = asyncio.Event(), []

        def take(output: Output) -> None:
            outputs.append(output)
            if output.finish or output.fault:
                ended.set()

        self.parts.runtimes[0].raw.submit_raw(sequence, take)
        async with asyncio.timeout(60):
            await ended.wait()
        return outputs


@contextlib.asynccontextmanager
async def media_world(
    folder: Path, name: str, nats_server: EmbeddedServer, args: Mapping[str, Any] = ARGS, **given: Any
) -> AsyncIterator[World]:
    """`folder` has the model, `name` is what it is called. `BLIND` is a simulator beside it that takes text only.

    `args` are vLLM's settings, `given` more of the worker.
    """
    parts = Parts()
    create = headrace.workers.main.create

    def taken(kind: str) -> Any:
        engine = create(kind)
        if kind == "vllm":
            parts.engine = engine
        return engine

    class Watched(Translator):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            parts.translators.append(self)

    class Kept(Runtime):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            parts.runtimes.append(self)

    settings = WorkerSettings(
        engine="vllm",
        model=str(folder),
        served_name=name,
        engine_args=args,
        tool_parser="none",
        reasoning_parser="none",
        drain_grace_s=0.0,
        **given,
    )
    with (
        mock.patch.object(headrace.workers.main, "create", taken),
        mock.patch.object(headrace.workers.kv.publisher, "Translator", Watched),
        mock.patch.object(headrace.workers.main, "Runtime", Kept),
        mock.patch.object(headrace.workers.main, "ENGINE_STOP_GRACE_S", 2.0),
        mock.patch.object(tests.support.local_deployment, "START_S", START_S),
    ):
        subjects = Subjects(f"{name}{os.getpid()}")
        async with (
            serving(nats_server, subjects, settings, sim(BLIND, args={"media_tokens": 0})) as running,
            httpx.AsyncClient(base_url=running.url, timeout=60) as client,
        ):
            yield World(name, running, client, parts, subjects)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def said(answer: dict[str, Any]) -> str:
    words: str = answer["choices"][0]["message"]["content"]
    return words
