"""Compacts conversations: the model summarises, and the summary replaces all but what the user said."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.broker.messages import Row
from headrace.broker.output_parts import parts_of
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import Plan
from headrace.frontend.generation.tenant import tenant_of
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.openai.chat_adapter import ChatAdapter, ChatOptions
from headrace.frontend.responses.answer import CompactedAnswer, usage_of
from headrace.frontend.responses.compaction_items import packed
from headrace.frontend.responses.history import RESPONSE_PREFIX, History
from headrace.frontend.responses.item_forms import Item, item_name, listed
from headrace.frontend.responses.items import kind_of
from headrace.frontend.responses.schema import CompactRequest
from headrace.frontend.responses.translate import messages_of
from headrace.frontend.schema.chat import ChatRequest
from headrace.frontend.writers.base import WholeWriter
from headrace.frontend.writers.usage import UsageCounter

REQUEST = (
    "Summarise the conversation so far for a model that will continue it. That model will see the user's messages and your "
    "summary, and nothing else. Keep each fact, decision, name, number, file, result of a tool, open question and unfinished "
    "step that it needs. Write only the summary."
)

_decoder = msgspec.json.Decoder(CompactRequest)


class NoSummary(FrontendError, status=502, code="engine_error", retriable=True):
    """The model answered the request for a summary with no text."""


class CompactionApi:
    """Plans compactions. `history` reads the conversation that a request names."""

    def __init__(self, chat: ChatAdapter, history: History) -> None:
        self._chat = chat
        self._history = history
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body and plan the summary of its conversation.

        Raises a FrontendError, an AdmissionError, or a JetStreamError if earlier turns cannot be read.
        """
        request = await decode_request(_decoder, body)
        tenant = tenant_of(exchange)
        past = await self._history.before(request.previous_response_id, tenant)
        exchange.asked_bytes += past.size
        items = await self._history.items(request.input if request.input is not None else [], past, tenant)
        messages = await exchange.aside(lambda: messages_of(request.instructions, past.items, items))
        messages.append({"role": "user", "content": REQUEST})
        chat = ChatRequest(model=request.model, messages=messages, session_id=request.prompt_cache_key or None)
        chat.service_tier = request.service_tier
        try:
            planned = await self._chat.plan_chat(chat, exchange, ChatOptions(id_prefix=RESPONSE_PREFIX))
        except BadRequest as error:
            if error.param is not None and error.param.startswith("messages"):
                error.param = "input"
            raise
        job = planned.jobs[0]
        kept = users_messages([*past.items, *items], job.id)
        return planned.answered_by(CompactionWriter(planned.head.id, job.id, kept, planned.counter))


def users_messages(items: Sequence[Mapping[str, Any]], job_id: str) -> list[Item]:
    """Return the messages of the user, as lists show them."""
    found = [item for item in items if kind_of(item, "input") == "message" and item.get("role") == "user"]
    return [listed(item, item_name(item, job_id, f"i{i}")) for i, item in enumerate(found)]


class CompactionWriter(WholeWriter):
    """Writes a compaction: what the user said, then the summary that the rows bring."""

    def __init__(self, name: str, job_id: str, kept: list[Item], counter: UsageCounter) -> None:
        self.open = 1
        self._name = name
        self._job_id = job_id
        self._kept = kept
        self._counter = counter
        self._texts: list[str] = []

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            self._counter.completion += len(row.ids)
            fin = row.fin
            texts = row.texts if fin is None or not fin.tail else [*row.texts, fin.tail]
            self._texts += [part.text for part in parts_of(texts) if part.kind == "content"]
            if fin is not None:
                self.open -= 1
                self._counter.end(0, fin)

    def body(self) -> bytes:
        """Return the JSON of the compaction. Raises NoSummary."""
        summary = "".join(self._texts).strip()
        if not summary:
            raise NoSummary
        item = {"type": "compaction", "id": f"cmp_{self._job_id}_0", "encrypted_content": packed(summary)}
        answer = CompactedAnswer(
            id=self._name, created_at=int(time.time()), output=[*self._kept, item], usage=usage_of(self._counter)
        )
        return msgspec.json.encode(answer)
