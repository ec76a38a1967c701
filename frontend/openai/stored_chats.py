"""Stores chat completions with `store`, and serves the routes that list, read, change and delete them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.broker.errors import ResponseNotStored, ResponseUnknown
from headrace.broker.ingress.response_store import StoredResponse, digest
from headrace.frontend.answer_schema import (
    ChatList,
    ChatMessageList,
    ChatRecord,
    DeletedChat,
    MetadataChange,
    StoredChat,
    StoredMessage,
)
from headrace.frontend.chat_schema import Message
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import tenant_in
from headrace.frontend.http.bodies import ReportingDecoder, decode_request
from headrace.frontend.http.exchange import PageQuery, read_body
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import RecordPort, ResponsePort
from headrace.frontend.settings import FrontendSettings

log = structlog.get_logger()

KIND = "chat"
MAX_ID = 160

_record = msgspec.json.Decoder(ChatRecord)
_change = ReportingDecoder(MetadataChange)


class ChatUnknown(FrontendError, status=404, code="completion_not_found"):
    """No such chat completion is stored."""


class StoredChats:
    """The stored chat completions. Their answers and messages are in the store of responses, the rest is in the records."""

    def __init__(self, store: ResponsePort, records: RecordPort, metrics: Metrics) -> None:
        self._store = store
        self._records = records
        self._stored = metrics.stored

    async def keep(self, tenant: str, record: ChatRecord, answer: bytes, messages: Sequence[Message]) -> None:
        """Store a completion. A failure is counted and logged: its tokens are paid for, so the answer goes out all the same."""
        try:
            await self._store.put(
                StoredResponse(
                    id=object_name(tenant, record.id),
                    tenant=tenant,
                    created=record.created,
                    answer=answer,
                    input=msgspec.json.encode(messages),
                )
            )
            await self._records.put(KIND, tenant, record.id, msgspec.json.encode(record))
        except ResponseNotStored as error:
            self._stored.labels(error.reason).inc()
            log.warning("completion.not_stored", completion=record.id, reason=error.reason, error=str(error))
        else:
            self._stored.labels("stored").inc()

    async def record(self, tenant: str, name: str) -> ChatRecord:
        """Return the record of a completion. Raises ChatUnknown."""
        value = await self._records.get(KIND, tenant, name) if len(name) <= MAX_ID else None
        if value is None:
            raise _unknown(name)
        return _record.decode(value)

    async def records(self, tenant: str) -> list[ChatRecord]:
        found = [_record.decode(value) for value in await self._records.list(KIND, tenant)]
        return sorted(found, key=lambda record: (record.created, record.id))

    async def body(self, tenant: str, name: str) -> StoredResponse:
        """Return the answer and the messages of a completion. Raises ChatUnknown."""
        try:
            return await self._store.get(object_name(tenant, name), tenant)
        except ResponseUnknown:
            raise _unknown(name) from None

    async def change(self, tenant: str, name: str, metadata: dict[str, str]) -> ChatRecord:
        """Replace the metadata of a completion. Raises ChatUnknown."""

        def changed(value: bytes) -> bytes:
            return msgspec.json.encode(msgspec.structs.replace(_record.decode(value), metadata=metadata))

        value = await self._records.change(KIND, tenant, name, changed) if len(name) <= MAX_ID else None
        if value is None:
            raise _unknown(name)
        return _record.decode(value)

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a completion. Raises ChatUnknown."""
        await self.record(tenant, name)
        await self._records.delete(KIND, tenant, name)
        try:
            await self._store.delete(object_name(tenant, name), tenant)
        except ResponseUnknown:  # the store made room
            return


def object_name(tenant: str, name: str) -> str:
    """Return the name of a completion in the store of responses. No client can choose one of another tenant or API."""
    return f"chat.{tenant}.{digest(name)}"


def _unknown(name: str) -> ChatUnknown:
    return ChatUnknown(f"there is no stored chat completion {name[:MAX_ID]!r}", param="completion_id")


class StoredChatRoutes:
    """The routes over stored completions. `chats` None = nothing is stored here."""

    def __init__(self, chats: StoredChats | None, settings: FrontendSettings) -> None:
        self._chats = chats
        self._settings = settings

    def routes(self) -> list[Route]:
        """Return the Starlette routes. Ids may contain slashes, as clients may choose a part of them."""
        base = "/v1/chat/completions"
        return [
            Route(base, self.list, methods=["GET"]),
            Route(f"{base}/{{id:path}}/messages", self.messages, methods=["GET"]),
            Route(f"{base}/{{id:path}}", self.one, methods=["GET", "POST", "DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        """List completions, the oldest first unless `order` says otherwise. Raises BadRequest."""
        query = PageQuery.of(request, ascending=True)
        wanted = _metadata_filter(request)
        model = request.query_params.get("model")
        tenant = tenant_in(request)
        found = []
        for record in await self._chats.records(tenant) if self._chats is not None else []:
            if model is not None and record.model != model:
                continue
            if all(record.metadata.get(key) == value for key, value in wanted.items()):
                found.append(record)
        page, more = query.page(found, [record.id for record in found])
        data = []
        for record in page:
            try:
                data.append(await self._whole(tenant, record))
            except ChatUnknown:  # it was deleted meanwhile, or the store made room
                continue
        return _json(ChatList(data=data, first_id=_id(page, 0), last_id=_id(page, -1), has_more=more))

    async def one(self, request: Request) -> Response:
        """Read a completion, change its metadata, or delete it. Raises ChatUnknown, BadRequest."""
        tenant, name, chats = tenant_in(request), request.path_params["id"], self._chats
        if chats is None:
            raise _unknown(name)
        if request.method == "DELETE":
            await chats.delete(tenant, name)
            return _json(DeletedChat(id=name))
        if request.method == "POST":
            change = await decode_request(_change, await read_body(request, self._settings))
            record = await chats.change(tenant, name, change.metadata or {})
        else:
            record = await chats.record(tenant, name)
        return _json(await self._whole(tenant, record))

    async def messages(self, request: Request) -> Response:
        """List the messages that a completion answers, the first one first. Raises ChatUnknown, BadRequest."""
        tenant, name, chats = tenant_in(request), request.path_params["id"], self._chats
        query = PageQuery.of(request, ascending=True)
        if chats is None:
            raise _unknown(name)
        await chats.record(tenant, name)
        given = msgspec.json.decode((await chats.body(tenant, name)).input, type=list[dict[str, Any]])
        listed = [_message(message, f"{name}-{i}") for i, message in enumerate(given)]
        page, more = query.page(listed, [message.id for message in listed])
        return _json(ChatMessageList(data=page, first_id=_id(page, 0), last_id=_id(page, -1), has_more=more))

    async def _whole(self, tenant: str, record: ChatRecord) -> StoredChat:
        assert self._chats is not None  # noqa: S101  # a record came from there
        body = await self._chats.body(tenant, record.id)
        answer = msgspec.json.decode(body.answer, type=StoredChat)
        return msgspec.structs.replace(answer, metadata=record.metadata)


def _message(message: dict[str, Any], name: str) -> StoredMessage:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    return StoredMessage(
        id=name,
        role=message["role"],
        content=content if isinstance(content, str) else None,
        content_parts=parts,
        name=message.get("name"),
        tool_calls=message.get("tool_calls") or msgspec.UNSET,
        tool_call_id=message.get("tool_call_id") or msgspec.UNSET,
    )


def _metadata_filter(request: Request) -> dict[str, str]:
    """Return the pairs that `metadata[key]=value` asks for. Raises BadRequest."""
    wanted = {}
    for name, value in request.query_params.multi_items():
        if name == "metadata" or (name.startswith("metadata[") and not name.endswith("]")):
            raise BadRequest("metadata must be given as metadata[key]=value", param="metadata")
        if name.startswith("metadata["):
            wanted[name[len("metadata[") : -1]] = value
    return wanted


def _id(page: Sequence[Any], place: int) -> str | None:
    return str(page[place].id) if page else None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
