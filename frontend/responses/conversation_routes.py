"""Routes of conversations and their items."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.frontend.generation.tenant import tenant_in
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.page_query import PageQuery, read_body
from headrace.frontend.responses.answer import ItemList
from headrace.frontend.responses.conversation_schema import (
    AddedItems,
    Conversation,
    ConversationRecord,
    DeletedConversation,
    NewConversation,
)
from headrace.frontend.responses.conversations import Conversations, no_item
from headrace.frontend.schema.stored import MetadataChange
from headrace.frontend.settings import FrontendSettings

BASE = "/v1/conversations"

_new = msgspec.json.Decoder(NewConversation)
_change = msgspec.json.Decoder(MetadataChange)
_added = msgspec.json.Decoder(AddedItems)


class ConversationRoutes:
    """The routes over conversations. `conversations` None = nothing is stored here."""

    def __init__(self, conversations: Conversations | None, settings: FrontendSettings) -> None:
        self._given = conversations
        self._settings = settings

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        return [
            Route(BASE, self.create, methods=["POST"]),
            Route(f"{BASE}/{{id}}", self.one, methods=["GET", "POST", "DELETE"]),
            Route(f"{BASE}/{{id}}/items", self.items, methods=["GET", "POST"]),
            Route(f"{BASE}/{{id}}/items/{{item_id}}", self.item, methods=["GET", "DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        """Create a conversation. Raises BadRequest, ResponseNotStored."""
        body = await read_body(request, self._settings)
        new = await decode_request(_new, body or b"{}")
        record = await self._conversations.create(tenant_in(request), new.metadata or {}, new.items or [])
        return _answer(record)

    async def one(self, request: Request) -> Response:
        """Read a conversation, change its metadata, or delete it. Raises ConversationUnknown, BadRequest."""
        tenant, name = tenant_in(request), request.path_params["id"]
        if request.method == "DELETE":
            await self._conversations.delete(tenant, name)
            return _json(DeletedConversation(id=name))
        if request.method == "POST":
            change = await decode_request(_change, await read_body(request, self._settings))
            return _answer(await self._conversations.change(tenant, name, change.metadata or {}))
        return _answer(await self._conversations.get(tenant, name))

    async def items(self, request: Request) -> Response:
        """List the items, the last one first unless `order` says otherwise, or add some.

        Raises ConversationUnknown, BadRequest, ResponseNotStored.
        """
        tenant, name = tenant_in(request), request.path_params["id"]
        if request.method == "POST":
            new = await decode_request(_added, await read_body(request, self._settings))
            added = await self._conversations.add(tenant, name, new.items)
            return _json(ItemList(data=added, first_id=added[0]["id"], last_id=added[-1]["id"], has_more=False))
        query = PageQuery.of(request)
        found = await self._conversations.items(tenant, await self._conversations.get(tenant, name))
        page, more = query.page(found, [item["id"] for item in found])
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return _json(ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=more))

    async def item(self, request: Request) -> Response:
        """Read an item, or remove it and return the conversation. Raises ConversationUnknown, ItemUnknown."""
        tenant, name, item_id = tenant_in(request), request.path_params["id"], request.path_params["item_id"]
        if request.method == "DELETE":
            return _answer(await self._conversations.drop(tenant, name, item_id))
        found = await self._conversations.items(tenant, await self._conversations.get(tenant, name))
        item = next((item for item in found if item["id"] == item_id), None)
        if item is None:
            raise no_item(name, item_id)
        return _json(item)

    @property
    def _conversations(self) -> Conversations:
        """Return the conversations. Raises BadRequest if nothing is stored here."""
        if self._given is None:
            raise unsupported("conversation", "is not supported here: nothing is stored")
        return self._given


def _answer(record: ConversationRecord) -> Response:
    return _json(Conversation(id=record.id, created_at=record.created_at, metadata=record.metadata))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
