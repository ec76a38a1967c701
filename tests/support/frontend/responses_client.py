"""Requests of the Responses API against a frontend without broker or workers."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from headrace.broker.codec import unpack_u32
from headrace.frontend.apis import Stores
from headrace.frontend.app import build_frontend
from headrace.frontend.ports import StoredJobPort
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import MODEL, TOKENIZER, Call, FakeIngress, Script
from tests.support.frontend.responses_store import MemoryRecords, MemoryStore


class Client:
    """One frontend and its store."""

    def __init__(self, script: Script | None = None, jobs: StoredJobPort | None = None, **settings: Any) -> None:
        self.ingress = FakeIngress(script)
        self.store = MemoryStore()
        self.records = MemoryRecords()
        stores = Stores(responses=self.store, records=self.records, jobs=jobs)
        self.frontend = build_frontend(self.ingress, FrontendSettings(**settings), stores=stores)

    async def create(self, **request: Any) -> Call:
        return await self.call("POST", "/v1/responses", {"model": MODEL, "input": "hi", **request})

    async def stream(self, **request: Any) -> list[dict[str, Any]]:
        call = await self.create(stream=True, **request)
        assert call.status == 200, call.body
        return events_of(call)

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Call:
        path, _, query = path.partition("?")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        call = Call(self.frontend.app, path, body, method=method, headers=named)
        call.scope["query_string"] = query.encode()
        return await call.run()

    def prompt(self, index: int = -1) -> str:
        """The text of a prompt; the tokenizer has one token per byte."""

        ids = unpack_u32(self.ingress.jobs[index].generation.token_ids)
        return str(Tokenizer.from_str(TOKENIZER.decode()).decode(ids, skip_special_tokens=False))


def events_of(call: Call) -> list[dict[str, Any]]:
    """The events of a stream whose lines name them as their data does."""
    found = []
    for block in call.body.decode().split("\n\n"):
        if not block:
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found
