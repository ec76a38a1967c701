"""Routes of stored responses, and the compaction of conversations."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.broker.errors import ResponseUnknown
from headrace.broker.ingress.response_store import StoredResponse
from headrace.broker.jobs import parts_of
from headrace.broker.messages.frames import Row
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.chat_schema import ChatRequest
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import Plan, tenant_in, tenant_of
from headrace.frontend.generation.sse import UsageCounter, WholeWriter
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, unsupported
from headrace.frontend.http.exchange import HttpExchange, PageQuery
from headrace.frontend.openai.api import chat_api
from headrace.frontend.openai.chat import ChatAdapter, ChatOptions
from headrace.frontend.openapi import (
    ERRORS,
    PAGE,
    changing,
    generation,
    in_path,
    json_answer,
    operation,
    stored_errors,
    streamed,
)
from headrace.frontend.ports import ResponsePort
from headrace.frontend.responses.answer import CompactedAnswer, DeletedResponse, InputTokens, ItemList, ResponseAnswer, usage_of
from headrace.frontend.responses.api import ResponsesApi, messages_of
from headrace.frontend.responses.conversations import ConversationRoutes, Conversations
from headrace.frontend.responses.items import RESPONSE_PREFIX, History, item_name, kind_of, listed, packed
from headrace.frontend.responses.items import ItemForm as Item
from headrace.frontend.responses.schema import (
    AddedItems,
    CompactRequest,
    Conversation,
    DeletedConversation,
    InputTokensRequest,
    NewConversation,
    ResponsesRequest,
)
from headrace.frontend.responses.stored import END, EventLog, EventReader, StoredBackground

MAX_ID = 128


class ResponseRoutes:
    """Endpoints over the store. `store` None = nothing is stored."""

    def __init__(self, store: ResponsePort | None, background: StoredBackground | None = None) -> None:
        self._store = store
        self._background = background

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses/{id}", self.one, methods=["GET", "DELETE"]),  # one route, so that a 405 names both
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def one(self, request: Request) -> Response:
        """Read or delete a response. Raises as `get` and `delete`."""
        return await (self.delete(request) if request.method == "DELETE" else self.get(request))

    async def get(self, request: Request) -> Response:
        """Return a response as it is now, or with `stream` its events. Raises ResponseUnknown, BadRequest."""
        query = request.query_params
        if query.get("stream", "false").lower() in ("false", "0", ""):
            if "starting_after" in query:
                raise BadRequest("starting_after is only allowed when stream is true", param="starting_after")
            return Response((await self._read(request)).answer, media_type="application/json")
        after = _event_number(query.get("starting_after"))
        record = await self._read(request)
        if self._background is None or not msgspec.json.decode(record.answer, type=_BackgroundField).background:
            raise unsupported("stream", "is only possible for responses that were made with background")
        log = await self._background.events(record.id, record.tenant)
        first = await log.since(after)  # an error must be raised before the status is sent
        return StreamingResponse(_follow(log, after, first), media_type="text/event-stream; charset=utf-8")

    async def delete(self, request: Request) -> Response:
        """Delete a response, and cancel it if it is running. Raises ResponseUnknown."""
        response_id = request.path_params["id"]
        if self._store is None or not _is_id(response_id):
            raise _missing(response_id)
        if self._background is not None:
            await self._background.forget(response_id, tenant_in(request))
        await self._store.delete(response_id, tenant_in(request))
        return _json(DeletedResponse(id=response_id))

    async def input_items(self, request: Request) -> Response:
        """List the input items of a response, the last one first unless `order` says otherwise.

        Raises ResponseUnknown, BadRequest.
        """
        query = PageQuery.of(request)
        turn = await self._read(request)
        items = [listed(item, "") for item in msgspec.json.decode(turn.input, type=list[dict[str, Any]])]
        page, more = query.page(items, [item["id"] for item in items])
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return _json(ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=more))

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response and return it; one that has ended does not change.

        Raises ResponseUnknown, BrokerUnavailable, and BadRequest for a response that was not made in the background.
        """
        record = await self._read(request)
        if self._background is None or not msgspec.json.decode(record.answer, type=_BackgroundField).background:
            raise BadRequest(
                "only a response made with background can be cancelled; to cancel another one close its connection",
                param="response_id",
            )
        record = await self._background.cancel(record.id, record.tenant)
        return Response(record.answer, media_type="application/json")

    async def _read(self, request: Request) -> StoredResponse:
        response_id = request.path_params["id"]
        if self._store is None or not _is_id(response_id):
            raise _missing(response_id)
        source = self._store if self._background is None else self._background
        return await source.get(response_id, tenant_in(request))


class _BackgroundField(msgspec.Struct):
    """The field `background` of a stored answer."""

    background: bool = False


async def _follow(log: EventLog | EventReader, after: int, events: bytes) -> AsyncIterator[bytes]:
    try:
        while events:
            yield events
            after += events.count(END)
            events = await log.since(after)
    finally:
        await log.close()


def _event_number(value: str | None) -> int:
    """Return the number of the first event to send. Raises BadRequest."""
    if value is None:
        return 0
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise BadRequest(f"starting_after must be the number of an event, got {value[:100]!r}", param="starting_after")
    return int(value) + 1


def _is_id(response_id: str) -> bool:
    """Return whether this can be the id of a response: the store has objects of other APIs, too."""
    return response_id.startswith(RESPONSE_PREFIX) and len(response_id) <= MAX_ID


def _missing(response_id: str) -> ResponseUnknown:
    return ResponseUnknown(response_id[:MAX_ID])


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


REQUEST = (
    "Summarise the conversation so far for a model that will continue it. That model will see the user's messages and your "
    "summary, and nothing else. Keep each fact, decision, name, number, file, result of a tool, open question and unfinished "
    "step that it needs. Write only the summary."
)

_decoder = ReportingDecoder(CompactRequest)


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


def _mount(site: Site) -> None:
    stored, records, jobs, settings = site.stores.responses, site.stores.records, site.stores.jobs, site.settings
    background = conversations = None
    if stored is not None and jobs is not None:
        background = StoredBackground(stored, jobs, max_bytes=settings.response_max_bytes)
        site.on_reconnect.append(background.store_again)
    if stored is not None and records is not None:
        conversations = Conversations(stored, records, settings)
    chat = chat_api(site)
    api = ResponsesApi(chat, stored, settings, site.metrics, background, conversations)
    history = History(stored, max_turns=settings.response_max_turns, max_bytes=settings.max_body_bytes)
    site.generate("/v1/responses", api, job=api)
    site.generate("/v1/responses/compact", CompactionApi(chat, history))
    site.answer("/v1/responses/input_tokens", api.count)
    site.routes += [*ResponseRoutes(stored, background).routes(), *ConversationRoutes(conversations, settings).routes()]


def _conversation_paths() -> dict[str, Any]:
    one = "/v1/conversations/{conversation_id}"
    wrong = stored_errors()
    item = {"application/json": {"schema": {"type": "object"}}}
    where = in_path("conversation_id")
    return {
        "/v1/conversations": {"post": changing("Create a conversation", "NewConversation", "Conversation")},
        one: {
            "parameters": [where],
            "get": operation("A conversation", {"200": json_answer("the conversation", "Conversation"), **wrong}),
            "post": changing("Change its metadata", "MetadataChange", "Conversation"),
            "delete": operation("Forget a conversation", {"200": json_answer("it is gone", "DeletedConversation"), **wrong}),
        },
        f"{one}/items": {
            "parameters": [where],
            "get": {"parameters": PAGE, **operation("Its items", {"200": json_answer("a page of them", "ItemList"), **wrong})},
            "post": changing("Add items", "AddedItems", "ItemList"),
        },
        f"{one}/items/{{item_id}}": {
            "parameters": [where, in_path("item_id")],
            "get": operation("An item", {"200": {"description": "the item", "content": item}, **wrong}),
            "delete": operation("Remove an item", {"200": json_answer("the conversation", "Conversation"), **wrong}),
        },
    }


def _response_paths() -> dict[str, Any]:
    where = in_path("response_id")
    wrong = {status: json_answer(text, "ErrorAnswer") for status, text in ERRORS.items() if status in ("400", "404", "503")}
    one = "/v1/responses/{response_id}"
    return {
        "/v1/responses": {"post": generation("Answer items with items", "ResponsesRequest", "ResponseAnswer")},
        "/v1/responses/input_tokens": {
            "post": generation("Count a prompt", "InputTokensRequest", "InputTokens", streams=False)
        },
        "/v1/responses/compact": {
            "post": generation("Compact a conversation", "CompactRequest", "CompactedAnswer", streams=False)
        },
        one: {
            "parameters": [where],
            "get": {
                "parameters": [
                    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
                    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
                ],
                **operation("A stored response, or its events", {"200": streamed("ResponseAnswer"), **wrong}),
            },
            "delete": operation("Forget a stored response", {"200": json_answer("it is gone", "DeletedResponse"), **wrong}),
        },
        f"{one}/input_items": {
            "parameters": [where, *PAGE],
            "get": operation("The items it answered", {"200": json_answer("a page of them", "ItemList"), **wrong}),
        },
        f"{one}/cancel": {
            "parameters": [where],
            "post": operation("Stop one in the background", {"200": json_answer("the response", "ResponseAnswer"), **wrong}),
        },
    }


API = HttpApi(
    mount=_mount,
    paths=lambda: {**_conversation_paths(), **_response_paths()},
    types=(
        ResponsesRequest,
        ResponseAnswer,
        InputTokensRequest,
        InputTokens,
        DeletedResponse,
        ItemList,
        CompactRequest,
        CompactedAnswer,
        NewConversation,
        AddedItems,
        Conversation,
        DeletedConversation,
    ),
)
