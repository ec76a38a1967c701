"""Keeps conversations: items that several responses add to, in the order in which they ended.

A conversation is a record with the ids of its items; the items themselves are in the store of responses, in an object for each
time that some were added. So adding costs only the new items, and reading takes two steps however long the conversation is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.broker.errors import ResponseUnknown
from headrace.broker.ingress.response_store import StoredResponse
from headrace.broker.jobs import new_id
from headrace.frontend.answer_schema import MetadataChange
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import tenant_in
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, unsupported
from headrace.frontend.http.exchange import PageQuery, read_body
from headrace.frontend.ports import RecordPort, ResponsePort
from headrace.frontend.responses.answer import ItemList
from headrace.frontend.responses.items import ItemForm as Item
from headrace.frontend.responses.items import MessageBuilder, Past, TooLong, item_name, listed
from headrace.frontend.responses.schema import (
    AddedItems,
    Conversation,
    ConversationRecord,
    DeletedConversation,
    ItemBatch,
    NewConversation,
)
from headrace.frontend.settings import FrontendSettings

KIND = "conv"
PREFIX = "conv_"
MAX_ID = 128
MAX_ITEMS = 4096

_record = msgspec.json.Decoder(ConversationRecord)


class ConversationUnknown(FrontendError, status=404, code="conversation_not_found"):
    """No such conversation is stored."""


class ItemUnknown(FrontendError, status=404, code="item_not_found"):
    """The conversation has no such item."""


class ItemsGone(BadRequest, code="conversation_incomplete"):
    """The conversation has lost items: their time to live is over, or the store made room."""


class Conversations:
    """The conversations of all tenants. It caches none."""

    def __init__(self, store: ResponsePort, records: RecordPort, settings: FrontendSettings) -> None:
        self._store = store
        self._records = records
        self._max_batches = settings.response_max_turns
        self._max_bytes = settings.max_body_bytes

    async def create(self, tenant: str, metadata: dict[str, str], items: Sequence[Item]) -> ConversationRecord:
        """Create a conversation. Raises BadRequest for a wrong item, ResponseNotStored, a JetStreamError."""
        record = ConversationRecord(id=f"{PREFIX}{new_id()}", created_at=int(time.time()), metadata=metadata)
        _check(items, ())
        if items:
            record.batches.append((await self._write(tenant, items, set()))[0])
        await self._records.put(KIND, tenant, record.id, msgspec.json.encode(record))
        return record

    async def get(self, tenant: str, name: str) -> ConversationRecord:
        """Return a conversation's record. Raises ConversationUnknown, a JetStreamError."""
        value = await self._records.get(KIND, tenant, name) if len(name) <= MAX_ID else None
        if value is None:
            raise _unknown(name)
        return _record.decode(value)

    async def change(self, tenant: str, name: str, metadata: dict[str, str]) -> ConversationRecord:
        """Replace the metadata of a conversation. Raises as `get`."""

        def changed(record: ConversationRecord) -> None:
            record.metadata = metadata

        return await self._change(tenant, name, changed)

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a conversation and its items. Raises as `get`."""
        record = await self.get(tenant, name)
        await self._records.delete(KIND, tenant, name)
        for batch in record.batches:
            with contextlib.suppress(ResponseUnknown):
                await self._store.delete(batch.name, tenant)

    async def past(self, tenant: str, name: str) -> Past:
        """Return the conversation as the past of a request. Raises as `items`, and TooLong."""
        record = await self.get(tenant, name)
        if record.size > self._max_bytes:
            raise _too_long(f"{record.size} bytes of items, the limit is {self._max_bytes}")
        items = await self.items(tenant, record)
        return Past(items=items, chain=[batch.name for batch in record.batches], size=record.size)

    async def items(self, tenant: str, record: ConversationRecord) -> list[Item]:
        """Return the items of a conversation in their order. Raises ItemsGone, a JetStreamError."""
        try:
            found = await self._store.get_all([batch.name for batch in record.batches], tenant)
        except ResponseUnknown:
            raise ItemsGone(
                f"conversation {record.id!r} has lost items: they expired, or the store made room", param="conversation"
            ) from None
        items = []
        for batch, stored in zip(record.batches, found, strict=True):
            kept = set(batch.items)
            items += [item for item in msgspec.json.decode(stored.input, type=list[Item]) if item["id"] in kept]
        return items

    async def add(self, tenant: str, name: str, items: Sequence[Item], *, check: bool = True, turn: str = "") -> list[Item]:
        """Add items at the end, and return them as they are listed. `check`: they come from a client and may be wrong.

        Those of a `turn`, by the id that is part of theirs, are added once.

        Raises as `get`, BadRequest for a wrong item, TooLong, ResponseNotStored.
        """
        record = await self.get(tenant, name)
        if _has(record, turn):
            return list(items)
        self._check_room(record, len(items))
        if check:
            _check(items, await self.items(tenant, record))
        batch, added = await self._write(tenant, items, set(record.item_ids))

        def changed(now: ConversationRecord) -> None:
            if _has(now, turn):
                return
            self._check_room(now, len(items))
            now.batches.append(batch)

        try:
            await self._change(tenant, name, changed)
        except FrontendError:  # it was deleted meanwhile, or is full
            with contextlib.suppress(ResponseUnknown):
                await self._store.delete(batch.name, tenant)
            raise
        return added

    async def drop(self, tenant: str, name: str, item_id: str) -> ConversationRecord:
        """Remove an item. Raises as `get`, and ItemUnknown."""

        def changed(record: ConversationRecord) -> None:
            for batch in record.batches:
                if item_id in batch.items:
                    batch.items.remove(item_id)
                    return
            raise no_item(name, item_id)

        return await self._change(tenant, name, changed)

    async def _change(self, tenant: str, name: str, change: Callable[[ConversationRecord], None]) -> ConversationRecord:
        def changed(value: bytes) -> bytes:
            record = _record.decode(value)
            change(record)
            return msgspec.json.encode(record)

        value = await self._records.change(KIND, tenant, name, changed) if len(name) <= MAX_ID else None
        if value is None:
            raise _unknown(name)
        return _record.decode(value)

    async def _write(self, tenant: str, items: Sequence[Item], taken: set[str]) -> tuple[ItemBatch, list[Item]]:
        """Store items as one object; those without an id, or with one that is taken, get a new one."""
        batch_id = new_id()
        named: list[Item] = []
        for i, item in enumerate(items):
            own = item.get("id")
            fresh = item_name(item, batch_id, f"i{i}")
            form = listed(item if own not in taken else {**item, "id": fresh}, fresh)
            taken.add(form["id"])
            named.append(form)
        data = msgspec.json.encode(named)
        name = f"{KIND}.{tenant}.{batch_id}"
        await self._store.put(StoredResponse(id=name, tenant=tenant, created=time.time(), input=data))
        return ItemBatch(name=name, items=[item["id"] for item in named], size=len(data)), named

    def _check_room(self, record: ConversationRecord, more: int) -> None:
        count = len(record.item_ids) + more
        if count > MAX_ITEMS:
            raise _too_long(f"{count} items, the limit is {MAX_ITEMS}")
        if len(record.batches) >= self._max_batches:
            raise _too_long(f"{len(record.batches) + 1} additions, the limit is {self._max_batches}")


def _has(record: ConversationRecord, turn: str) -> bool:
    return bool(turn) and any(turn in item_id for item_id in record.item_ids)


def _check(items: Sequence[Item], before: Sequence[Item]) -> None:
    """Check that items can follow others in a conversation. Raises BadRequest with the path of the field."""
    builder = MessageBuilder()
    for item in before:
        builder.add(item, "conversation")
    for i, item in enumerate(items):
        builder.add(item, f"items[{i}]")


def _unknown(name: str) -> ConversationUnknown:
    return ConversationUnknown(f"there is no conversation {name[:MAX_ID]!r}", param="conversation")


def no_item(name: str, item_id: str) -> ItemUnknown:
    return ItemUnknown(f"conversation {name[:MAX_ID]!r} has no item {item_id[:MAX_ID]!r}", param="item_id")


def _too_long(what: str) -> TooLong:
    return TooLong(f"the conversation has {what}; start a new one and add what matters", param="conversation")


BASE = "/v1/conversations"

_new = ReportingDecoder(NewConversation)
_change = ReportingDecoder(MetadataChange)
_added = ReportingDecoder(AddedItems)


class ConversationRoutes:
    """The routes over conversations. `conversations` None = nothing is stored here."""

    def __init__(self, conversations: Conversations | None, settings: FrontendSettings) -> None:
        self._given = conversations
        self._settings = settings

    def routes(self) -> list[Route]:
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
