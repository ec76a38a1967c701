"""Serves the routes over uploads in parts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.broker.files.quota import SLACK
from headrace.broker.files.records import check_filename, check_purpose
from headrace.broker.files.store import FileDraft
from headrace.broker.files.uploads import UploadStore
from headrace.frontend.files.gone_clients import tolerant
from headrace.frontend.files.multipart import FileData, FormReader, form_events
from headrace.frontend.files.schema import NewUpload, UploadCompletion, UploadObject, UploadPart
from headrace.frontend.generation.tenant import tenant_in
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.body_stream import body_pieces
from headrace.frontend.http.page_query import read_body
from headrace.frontend.metrics import Metrics
from headrace.frontend.settings import FrontendSettings

_new = msgspec.json.Decoder(NewUpload)
_completion = msgspec.json.Decoder(UploadCompletion)


class UploadRoutes:
    """The routes over uploads of a tenant."""

    def __init__(self, uploads: UploadStore, settings: FrontendSettings, metrics: Metrics) -> None:
        self._uploads = uploads
        self._settings = settings
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        base = "/v1/uploads"
        return [
            Route(base, tolerant(self.create, self._metrics), methods=["POST"]),
            Route(f"{base}/{{id}}/parts", tolerant(self.add_part, self._metrics), methods=["POST"]),
            Route(f"{base}/{{id}}/complete", tolerant(self.complete, self._metrics), methods=["POST"]),
            Route(f"{base}/{{id}}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Open an upload. Raises BadRequest, FileError."""
        wish = await decode_request(_new, await read_body(request, self._settings))
        draft = FileDraft(
            tenant=tenant_in(request),
            filename=check_filename(wish.filename),
            purpose=check_purpose(wish.purpose),
            life_s=None if wish.expires_after is None else wish.expires_after.seconds,
        )
        return _json(UploadObject.of(await self._uploads.create(draft, size=wish.bytes, mime_type=wish.mime_type)))

    async def add_part(self, request: Request) -> Response:
        """Store the part of a form as it arrives. Raises BadRequest, FileError, ClientGone."""
        upload = await self._uploads.open(request.path_params["id"], tenant_in(request))
        form = FormReader(request.headers.get("content-type", ""), "data")
        limit = self._uploads.limits.part_bytes + SLACK
        pieces = body_pieces(request, limit=limit, stall_s=self._settings.body_timeout_s)
        part = await self._uploads.add_part(upload, _content(pieces, form))
        return _json(UploadPart(id=part.id, created_at=int(part.created), upload_id=upload.id))

    async def complete(self, request: Request) -> Response:
        """Make a file of the parts. Raises BadRequest, FileError."""
        wish = await decode_request(_completion, await read_body(request, self._settings))
        upload, file = await self._uploads.complete(request.path_params["id"], tenant_in(request), wish.part_ids, md5=wish.md5)
        return _json(UploadObject.of(upload, file))

    async def cancel(self, request: Request) -> Response:
        """Cancel an upload. Raises FileError."""
        return _json(UploadObject.of(await self._uploads.cancel(request.path_params["id"], tenant_in(request))))


async def _content(pieces: AsyncIterator[bytes], form: FormReader) -> AsyncIterator[bytes]:
    async for event in form_events(pieces, form):
        if isinstance(event, FileData):
            yield event.data


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
