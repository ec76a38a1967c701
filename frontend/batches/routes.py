"""Serves the routes over batches: create, list, read, cancel."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.broker.batches.service import Batches, NewBatch
from headrace.broker.batches.windows import window_s
from headrace.frontend.batches.schema import BatchList, BatchObject, NewBatchRequest
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.tenant import tenant_in
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.page_query import PageQuery, read_body
from headrace.frontend.settings import FrontendSettings

BASE = "/v1/batches"

_new = msgspec.json.Decoder(NewBatchRequest)


class BatchRoutes:
    """The routes over batches of a tenant."""

    def __init__(self, batches: Batches, settings: FrontendSettings) -> None:
        self._batches = batches
        self._settings = settings

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        return [
            Route(BASE, self.create, methods=["POST"]),
            Route(BASE, self.list, methods=["GET"]),
            Route(f"{BASE}/{{id}}", self.one, methods=["GET"]),
            Route(f"{BASE}/{{id}}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Make a batch of an uploaded file. Raises BadRequest, BatchError, or a JetStreamError."""
        asked = await decode_request(_new, await read_body(request, self._settings))
        try:
            window_s(asked.completion_window)
        except ValueError as error:
            raise BadRequest(str(error), param="completion_window") from None
        new = NewBatch(
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            metadata=asked.metadata,
            output_expires_s=asked.output_expires_after.seconds if asked.output_expires_after is not None else None,
        )
        return _json(BatchObject.of(await self._batches.create(tenant_in(request), new)))

    async def list(self, request: Request) -> Response:
        """List batches, the newest first unless `order` says otherwise. Raises BadRequest."""
        query = PageQuery.of(request)
        records = (await self._batches.list(tenant_in(request)))[::-1]
        page, more = query.page(records, [record.id for record in records])
        ends = (page[0].id, page[-1].id) if page else (None, None)
        return _json(BatchList(data=[BatchObject.of(r) for r in page], first_id=ends[0], last_id=ends[1], has_more=more))

    async def one(self, request: Request) -> Response:
        """Describe a batch. Raises BatchUnknown."""
        return _json(BatchObject.of(await self._batches.get(tenant_in(request), request.path_params["id"])))

    async def cancel(self, request: Request) -> Response:
        """Begin to cancel a batch. Raises BatchUnknown, BatchChangeRefused."""
        return _json(BatchObject.of(await self._batches.cancel(tenant_in(request), request.path_params["id"])))


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
