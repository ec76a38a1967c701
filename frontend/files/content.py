"""Answers with the content of a file, whole or a range of it, as it is read from the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.broker.files.records import FileRecord
from headrace.frontend.files.ranges import Span
from headrace.frontend.http.http_exchange import log_ids
from headrace.frontend.metrics import Metrics

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
