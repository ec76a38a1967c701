"""OpenAI's routes over files and uploads in parts, including range requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args
from urllib.parse import quote

import msgspec
import structlog
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.broker.errors import BrokerUnavailable
from headrace.broker.files.records import SLACK, FileLimits, FileRecord, UploadRecord, check_filename, check_life, check_purpose
from headrace.broker.files.store import MAX_LISTED, FileDraft, FileStore, FileWriter
from headrace.broker.files.uploads import UploadStore
from headrace.frontend.answer_schema import ExpiresAfter, Page
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.errors import FrontendError
from headrace.frontend.generation.plan import tenant_in
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, missing, wrong
from headrace.frontend.http.exchange import ClientGone, PageQuery, announced_bytes, body_pieces, log_ids, read_body
from headrace.frontend.http.loop import forget_frames
from headrace.frontend.http.multipart import FileBegin, FileData, FormField, FormReader, form_events
from headrace.frontend.metrics import Metrics
from headrace.frontend.openapi import in_path, json_answer, json_body, operation, stored_errors
from headrace.frontend.ports import JobPort
from headrace.frontend.settings import FrontendSettings

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]


class FileObject(msgspec.Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None

    @classmethod
    def of(cls, record: FileRecord) -> FileObject:
        return cls(
            id=record.id,
            bytes=record.bytes,
            created_at=int(record.created),
            expires_at=None if record.expires is None else int(record.expires),
            filename=record.filename,
            purpose=record.purpose,
        )


class FileList(Page, kw_only=True):
    """A page of files."""

    data: list[FileObject]


class DeletedFile(msgspec.Struct, kw_only=True):
    """A file that was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class NewUpload(msgspec.Struct, kw_only=True):
    """A file to be uploaded in parts."""

    bytes: Annotated[int, Meta(ge=0)]
    filename: str
    mime_type: Annotated[str, Meta(max_length=255)]
    purpose: str
    expires_after: ExpiresAfter | None = None


class UploadCompletion(msgspec.Struct, kw_only=True):
    """The parts of a file, in order."""

    part_ids: Annotated[list[str], Meta(max_length=10_000)]
    md5: str | None = None


class UploadObject(msgspec.Struct, kw_only=True):
    """An upload. `file`: once it is completed."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None = None

    @classmethod
    def of(cls, record: UploadRecord, file: FileRecord | None = None) -> UploadObject:
        return cls(
            id=record.id,
            bytes=record.bytes,
            created_at=int(record.created),
            expires_at=int(record.expires),
            filename=record.filename,
            purpose=record.purpose,
            status=record.status,
            file=None if file is None else FileObject.of(file),
        )


class UploadPart(msgspec.Struct, kw_only=True):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


SCHEMAS: tuple[Any, ...] = (
    FileObject,
    FileList,
    DeletedFile,
    NewUpload,
    UploadCompletion,
    UploadObject,
    UploadPart,
)


_TEXT = {"type": "string"}
_BINARY = {"type": "string", "format": "binary"}


def _paths() -> dict[str, Any]:
    errors = stored_errors()
    full = {**errors["400"], "description": "the tenant has as many files or bytes as it may have"}
    wrong = {**errors, "403": full, "429": {**errors["503"], "description": "too many requests; see Retry-After"}}

    def asking(summary: str, answer: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        described = operation(summary, {"200": json_answer("the answer", answer), **wrong})
        return described if body is None else {**described, "requestBody": body}

    page = [
        _query("purpose", _TEXT),
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}),
        _query("order", {"type": "string", "enum": ["asc", "desc"]}),
        _query("after", _TEXT),
    ]
    form = {
        "file": _BINARY,
        "purpose": {"type": "string", "enum": list(get_args(Purpose))},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    }
    content = {"application/octet-stream": {"schema": _BINARY}}
    download = {
        "200": {"description": "the content", "content": content},
        "206": {"description": "the wanted range", "content": content},
        "416": {**errors["400"], "description": "the range lies behind the end"},
        **wrong,
    }
    where = in_path("id")
    return {
        "/v1/files": {
            "post": asking("Upload a file", "FileObject", _form(form, ["file", "purpose"])),
            "get": {**asking("List files", "FileList"), "parameters": page},
        },
        "/v1/files/{id}": {
            "parameters": [where],
            "get": asking("A file", "FileObject"),
            "delete": asking("Delete a file", "DeletedFile"),
        },
        "/v1/files/{id}/content": {
            "parameters": [where, {"name": "range", "in": "header", "schema": _TEXT}],
            "get": operation("The content of a file", download),
        },
        "/v1/uploads": {"post": asking("Open an upload in parts", "UploadObject", json_body("NewUpload"))},
        "/v1/uploads/{id}/parts": {
            "parameters": [where],
            "post": asking("Add a part", "UploadPart", _form({"data": _BINARY}, ["data"])),
        },
        "/v1/uploads/{id}/complete": {
            "parameters": [where],
            "post": asking("Make a file of the parts", "UploadObject", json_body("UploadCompletion")),
        },
        "/v1/uploads/{id}/cancel": {"parameters": [where], "post": asking("Cancel an upload", "UploadObject")},
    }


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def _form(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


def file_limits(settings: FrontendSettings) -> FileLimits:
    return FileLimits(
        file_bytes=settings.file_max_bytes,
        batch_bytes=min(settings.batch_file_max_bytes, settings.file_max_bytes),
        tenant_files=settings.tenant_files,
        tenant_bytes=settings.tenant_file_bytes,
    )


# Reads the `Range` header of a request (RFC 9110) for a body of a known size.

_ONE = re.compile(r"\s*bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*\Z", re.IGNORECASE)


class RangeUnsatisfiable(FrontendError, status=416, code="range_not_satisfiable"):
    """The wanted range lies behind the end of the file."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a body of `total` bytes."""

    offset: int
    length: int
    total: int

    @property
    def header(self) -> str:
        return f"bytes {self.offset}-{self.offset + self.length - 1}/{self.total}"


def span_of(header: str | None, total: int) -> Span | None:
    """Return the wanted part, None for the whole body, also where several ranges or other units are asked for.

    Raises RangeUnsatisfiable.
    """
    found = _ONE.match(header) if header is not None else None
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        length = min(int(last), total)
        offset = total - length
    else:
        offset = int(first)
        if last and int(last) < offset:
            return None
        length = min(int(last) + 1 if last else total, total) - offset
    if length <= 0:
        raise RangeUnsatisfiable(
            f"the file has {total} bytes; the range {(header or '')[:100]!r} has none of them", param="range"
        )
    return Span(offset, length, total)


log = structlog.get_logger()


class FileContent(Response):
    """The content of a file. A store that fails in the middle ends the connection, so that no part looks like the whole."""

    def __init__(
        self, record: FileRecord, pieces: AsyncIterator[bytes], span: Span | None, metrics: Metrics, slow_s: float
    ) -> None:
        """`pieces` are those of the span. A client that takes none of them for `slow_s` is cut off."""
        super().__init__(status_code=200 if span is None else 206, media_type="application/octet-stream")
        self._pieces = pieces
        self._metrics = metrics
        self._slow_s = slow_s
        self.headers["content-length"] = str(record.bytes if span is None else span.length)
        self.headers["content-disposition"] = disposition(record.filename)
        self.headers["accept-ranges"] = "bytes"
        self.headers["etag"] = etag(record)
        if span is not None:
            self.headers["content-range"] = span.header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = scope.get("headrace.connection")
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] != "HEAD":
            async for piece in self._pieces:
                if wire is not None and wire.lost:
                    scope["headrace.outcome"] = "client_gone"
                    self._metrics.disconnects.inc()
                    return
                try:
                    async with asyncio.timeout(self._slow_s):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                except TimeoutError:
                    scope["headrace.outcome"] = "slow_client"
                    self._metrics.slow_clients.inc()
                    log.warning("client.slow", **log_ids(scope), seconds=self._slow_s)
                    if wire is not None:
                        wire.cut(b"")
                    return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def etag(record: FileRecord) -> str:
    """Return the tag by which a client continues a broken download."""
    return f'"{record.sha256}"'


def disposition(filename: str) -> str:
    """Return the header that names the file (RFC 6266)."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in '"\\%' else "_" for c in filename)
    extended = "" if plain == filename else f"; filename*=UTF-8''{quote(filename, safe='')}"
    return f'attachment; filename="{plain}"{extended}'


# Ends requests whose client has left in the middle of the body without an error in the log.

Handler = Callable[[Request], Awaitable[Response]]

CLIENT_CLOSED = 499


def tolerant(handler: Handler, metrics: Metrics) -> Handler:
    """Return a handler that counts a client that leaves. The answer reaches no client; it is there for the access log."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGone as gone:
            request.scope["headrace.outcome"] = "client_gone"
            metrics.disconnects.inc()
            forget_frames(gone)
            return Response(status_code=CLIENT_CLOSED)

    return handle


def _check_stores(port: JobPort) -> None:
    """Refuse at once what the broker would not store. Raises BrokerUnavailable."""
    if not port.storing:
        raise BrokerUnavailable(f"this frontend {port.trouble}; try again shortly")


class FileRoutes:
    def __init__(self, files: FileStore, port: JobPort, settings: FrontendSettings, metrics: Metrics) -> None:
        self._files = files
        self._port = port
        self._settings = settings
        self._metrics = metrics

    def routes(self) -> list[Route]:
        base = "/v1/files"
        return [
            Route(base, tolerant(self.create, self._metrics), methods=["POST"]),
            Route(base, self.list, methods=["GET"]),
            Route(f"{base}/{{id}}", self.one, methods=["GET", "DELETE"]),
            Route(f"{base}/{{id}}/content", self.content, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Store the file of a form as it arrives.

        Raises BadRequest, FileError, ClientGone, BrokerUnavailable, or a JetStreamError.
        """
        _check_stores(self._port)
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
            _new.report(fields.keys() - _FORM)
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
        """Describe a file, or delete it. Raises FileUnknown, BrokerUnavailable."""
        file_id, tenant = request.path_params["id"], tenant_in(request)
        if request.method == "DELETE":
            _check_stores(self._port)
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


_new = ReportingDecoder(NewUpload)
_FORM = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
_completion = ReportingDecoder(UploadCompletion)


class UploadRoutes:
    def __init__(self, uploads: UploadStore, port: JobPort, settings: FrontendSettings, metrics: Metrics) -> None:
        self._uploads = uploads
        self._port = port
        self._settings = settings
        self._metrics = metrics

    def routes(self) -> list[Route]:
        base = "/v1/uploads"
        return [
            Route(base, tolerant(self.create, self._metrics), methods=["POST"]),
            Route(f"{base}/{{id}}/parts", tolerant(self.add_part, self._metrics), methods=["POST"]),
            Route(f"{base}/{{id}}/complete", tolerant(self.complete, self._metrics), methods=["POST"]),
            Route(f"{base}/{{id}}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Open an upload. Raises BadRequest, FileError, BrokerUnavailable."""
        _check_stores(self._port)
        wish = await decode_request(_new, await read_body(request, self._settings))
        draft = FileDraft(
            tenant=tenant_in(request),
            filename=check_filename(wish.filename),
            purpose=check_purpose(wish.purpose),
            life_s=None if wish.expires_after is None else wish.expires_after.seconds,
        )
        return _json(UploadObject.of(await self._uploads.create(draft, size=wish.bytes, mime_type=wish.mime_type)))

    async def add_part(self, request: Request) -> Response:
        """Store the part of a form as it arrives. Raises BadRequest, FileError, ClientGone, BrokerUnavailable."""
        _check_stores(self._port)
        upload = await self._uploads.open(request.path_params["id"], tenant_in(request))
        form = FormReader(request.headers.get("content-type", ""), "data")
        limit = self._uploads.limits.part_bytes + SLACK
        pieces = body_pieces(request, limit=limit, stall_s=self._settings.body_timeout_s)
        part = await self._uploads.add_part(upload, _content(pieces, form))
        return _json(UploadPart(id=part.id, created_at=int(part.created), upload_id=upload.id))

    async def complete(self, request: Request) -> Response:
        """Make a file of the parts. Raises BadRequest, FileError, BrokerUnavailable."""
        _check_stores(self._port)
        wish = await decode_request(_completion, await read_body(request, self._settings))
        upload, file = await self._uploads.complete(request.path_params["id"], tenant_in(request), wish.part_ids, md5=wish.md5)
        return _json(UploadObject.of(upload, file))

    async def cancel(self, request: Request) -> Response:
        """Cancel an upload. Raises FileError, BrokerUnavailable."""
        _check_stores(self._port)
        return _json(UploadObject.of(await self._uploads.cancel(request.path_params["id"], tenant_in(request))))


async def _content(pieces: AsyncIterator[bytes], form: FormReader) -> AsyncIterator[bytes]:
    async for event in form_events(pieces, form):
        if isinstance(event, FileData):
            yield event.data


def _mount(site: Site) -> None:
    if (uploads := site.stores.uploads) is not None:
        site.routes += FileRoutes(uploads.files, site.port, site.settings, site.metrics).routes()
        site.routes += UploadRoutes(uploads, site.port, site.settings, site.metrics).routes()


API = HttpApi(mount=_mount, paths=_paths, types=SCHEMAS)
