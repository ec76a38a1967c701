"""Requests of the Messages API against a frontend without broker or workers."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from headrace.broker.codec import unpack_u32
from tests.support.frontend.fakes import MODEL, TOKENIZER, Call, FakeIngress, Script, frontend


class Client:
    def __init__(self, script: Script | None = None, **settings: Any) -> None:
        self.ingress = FakeIngress(script)
        self.frontend = frontend(self.ingress, **settings)

    async def create(self, path: str = "/v1/messages", **request: Any) -> Call:
        headers = {"x-api-key": "sk-any", "anthropic-version": "2023-06-01"}
        body = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}], **request}
        return await Call(self.frontend.app, path, body, headers=headers).run()

    async def stream(self, **request: Any) -> list[dict[str, Any]]:
        call = await self.create(stream=True, **request)
        assert call.status == 200, call.body
        return events_of(call.body)

    def prompt(self, index: int = -1) -> str:
        """The text of a prompt; the tokenizer has one token per byte."""
        ids = unpack_u32(self.ingress.jobs[index].generation.token_ids)
        return str(Tokenizer.from_str(TOKENIZER.decode()).decode(ids, skip_special_tokens=False))


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream whose lines name them as their data does."""
    found = []
    for block in body.decode().split("\n\n"):
        if not block:
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found
