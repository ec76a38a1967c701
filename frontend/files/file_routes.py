"""Serves the routes over files: upload, list, read, download, delete."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.broker.files.quota import SLACK
from headrace.broker.files.records import check_filename, check_life, check_purpose
from headrace.broker.files.store import MAX_LISTED, FileDraft, FileStore, FileWriter
from headrace.frontend.files.content import FileContent, etag
from headrace.frontend.files.gone_clients import tolerant
from headrace.frontend.files.multipart import FileBegin, FileData, FormField, FormReader, form_events
from headrace.frontend.files.ranges import RangeUnsatisfiable, span_of
from headrace.frontend.files.schema import DeletedFile, FileList, FileObject
from headrace.frontend.generation.tenant import tenant_in
from headrace.frontend.http.body_stream import announced_bytes, body_pieces
from headrace.frontend.http.field_checks import missing, wrong
from headrace.frontend.http.page_query import PageQuery
from headrace.frontend.metrics import Metrics
from headrace.frontend.settings import FrontendSettings


class FileRoutes:
    """The routes over files of a tenant."""

    def __init__(self, files: FileStore, settings: FrontendSettings, metrics: Metrics) -> None:
        self._files = files
        self._settings = settings
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        base = "/v1/files"
        return [
            Route(base, tolerant(self.create, self._metrics), methods=["POST"]),
            Route(base, self.list, methods=["GET"]),
            Route(f"{base}/{{id}}", self.one, methods=["GET", "DELETE"]),
            Route(f"{base}/{{id}}/content", self.content, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Store the file of a form as it arrives. Raises BadRequest, FileError, ClientGone, or a JetStreamError."""
        pieces = body_pieces(request, limit=self._files.limits.file_bytes + SLACK, stall_s=self._settings.body_timeout_s)
        form = FormReader(request.headers.get("content-type", ""), "file")
        fields: dict[str, str] = {}
        writer: FileWriter | None = None
        async with contextlib.AsyncExitStack() as stack:
            async for event in form_events(pieces, form):
                match event:
                    case FormField(name, value):
                        fields[name] = value
                    case FileBegin(filename):
                        draft = FileDraft(
                            tenant=tenant_in(request),
                            filename=check_filename(filename),
                            purpose=check_purpose(fields["purpose"]) if "purpose" in fields else "",
                            life_s=_life(fields),
                            announced=announced_bytes(request),
                        )
                        writer = await stack.enter_async_context(self._files.writer(draft))
                    case FileData(data) if writer is not None:
                        await writer.write(data)
            if "purpose" not in fields:
                raise missing("purpose")
            assert writer is not None  # noqa: S101  # or the form would have been incomplete
            record = await writer.commit(purpose=check_purpose(fields["purpose"]), life_s=_life(fields))
        return _json(FileObject.of(record))

    async def list(self, request: Request) -> Response:
        """List files, the newest first unless `order` says otherwise. Raises BadRequest, FileInvalid."""
        query = PageQuery.of(request, most=MAX_LISTED, usual=MAX_LISTED)
        page = await self._files.page(
            tenant_in(request),
            purpose=request.query_params.get("purpose"),
            limit=query.limit,
            ascending=query.ascending,
            after=query.after,
        )
        data = [FileObject.of(record) for record in page.files]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return _json(FileList(data=data, first_id=first, last_id=last, has_more=page.more))

    async def one(self, request: Request) -> Response:
        """Describe a file, or delete it. Raises FileUnknown."""
        file_id, tenant = request.path_params["id"], tenant_in(request)
        if request.method == "DELETE":
            await self._files.delete(file_id, tenant)
            return _json(DeletedFile(id=file_id))
        return _json(FileObject.of(await self._files.get(file_id, tenant)))

    async def content(self, request: Request) -> Response:
        """Answer with the content, or with the range that is asked for. Raises FileUnknown, RangeUnsatisfiable."""
        record = await self._files.get(request.path_params["id"], tenant_in(request))
        wanted = request.headers.get("range")
        if request.headers.get("if-range", etag(record)) != etag(record):
            wanted = None
        try:
            span = span_of(wanted, record.bytes)
        except RangeUnsatisfiable as error:
            return Response(error.body(), 416, {"content-range": f"bytes */{record.bytes}"}, "application/json")
        reading = self._files.read(record) if span is None else self._files.read(record, offset=span.offset, length=span.length)
        first = await anext(reading, b"")  # so that a file that cannot be read is an error and no broken answer
        return FileContent(record, _after(first, reading), span, self._metrics, self._settings.slow_client_s)


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in rest:
        yield piece


def _life(fields: dict[str, str]) -> int | None:
    """Read the expiry from the fields of a form. Raises FileInvalid, BadRequest."""
    seconds = fields.get("expires_after[seconds]")
    if seconds is not None and not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise wrong("expires_after.seconds", "a number of seconds")
    return check_life(fields.get("expires_after[anchor]"), None if seconds is None else int(seconds))


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
