"""Routes of stored responses: read one, list its input items, cancel or delete it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.broker.errors import ResponseUnknown
from headrace.broker.ingress.response_store import StoredResponse
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.tenant import tenant_in
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.page_query import PageQuery
from headrace.frontend.ports import ResponsePort
from headrace.frontend.responses.answer import DeletedResponse, ItemList
from headrace.frontend.responses.eventlog import END, EventLog
from headrace.frontend.responses.history import RESPONSE_PREFIX
from headrace.frontend.responses.item_forms import listed
from headrace.frontend.responses.stored_background import EventReader, StoredBackground

MAX_ID = 128


class ResponseRoutes:
    """Endpoints over the store. `store` None = nothing is stored."""

    def __init__(self, store: ResponsePort | None, background: StoredBackground | None = None) -> None:
        self._store = store
        self._background = background

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
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
