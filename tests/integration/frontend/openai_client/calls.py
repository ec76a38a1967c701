"""Requests of the `openai` client to a simulated model, with defaults that make answers short and repeatable."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

MODEL = "acme/plain"
HI: list[Any] = [{"role": "user", "content": "Say hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


async def chat(client: AsyncOpenAI, **options: Any) -> Any:
    extra = options.pop("extra_body", {})
    given = {"model": MODEL, "messages": HI, "max_tokens": 12, "temperature": 0, **options}
    return await client.chat.completions.create(**given, extra_body=extra)


async def complete(client: AsyncOpenAI, **options: Any) -> Any:
    extra = options.pop("extra_body", {})
    given = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, **options}
    return await client.completions.create(**given, extra_body=extra)


async def events(stream: Any) -> list[Any]:
    return [event async for event in stream]


def said(answer: str) -> dict[str, Any]:
    return {"vllm_xargs": {"sim_answer": answer}}
