"""Posts the ends of batches to the operator's webhook, signed by the rules of Standard Webhooks.

A call is one POST over one connection, of which only the status is read. The owner of the batch repeats it, with the same id.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ssl
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
import structlog

from headrace.broker.batches.record import BatchRecord
from headrace.frontend.batches.schema import BatchEvent, EventData

log = structlog.get_logger()

CALL_S = 15.0
MAX_STATUS_LINE = 8192
SECRET_MARK = "whsec_"  # noqa: S105  # before a secret in base64, as Standard Webhooks has it


class BatchWebhook:
    """The receiver of events about batches."""

    def __init__(self, url: str, secret: str = "", *, wall: Callable[[], float] = time.time) -> None:
        """`secret` signs the events; empty: they are not signed. Raises ValueError for a secret that is none."""
        self._parts = urlsplit(url)
        self._port = self._parts.port or (443 if self._parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if self._parts.scheme == "https" else None
        self._key = key_of(secret)
        self._wall = wall

    async def send(self, record: BatchRecord) -> bool:
        """Post the event of a batch's end. Returns True if the receiver answered with a status of 2xx."""
        event = event_of(record)
        try:
            async with asyncio.timeout(CALL_S):
                status = await self._post(event.id, msgspec.json.encode(event))
        except (OSError, TimeoutError, ValueError) as error:
            log.warning("webhook.failed", batch=record.id, event_type=event.type, error=str(error) or type(error).__name__)
            return False
        if not 200 <= status < 300:
            log.warning("webhook.refused", batch=record.id, event_type=event.type, status=status)
        return 200 <= status < 300

    async def _post(self, event_id: str, body: bytes) -> int:
        host = self._parts.hostname or ""
        server_name = host if self._tls is not None else None
        reader, writer = await asyncio.open_connection(
            host, self._port, ssl=self._tls, server_hostname=server_name, limit=MAX_STATUS_LINE
        )
        try:
            writer.write(self._head(event_id, body) + body)
            await writer.drain()
            line = await reader.readline()
            return int(line.split(b" ", 2)[1]) if line.startswith(b"HTTP/1.") and line.count(b" ") else 0
        finally:
            writer.transport.abort()

    def _head(self, event_id: str, body: bytes) -> bytes:
        parts = self._parts
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        at = int(self._wall())
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "User-Agent: headrace",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            f"webhook-id: {event_id}",
            f"webhook-timestamp: {at}",
        ]
        if self._key:
            lines.append(f"webhook-signature: {signature(self._key, event_id, at, body)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def event_of(record: BatchRecord) -> BatchEvent:
    """Return the event of a batch's end. Its id is the same each time."""
    ended_at = getattr(record, f"{record.status}_at")
    digest = hashlib.sha256(f"{record.id} {record.status}".encode()).hexdigest()[:32]
    kind = f"batch.{record.status}"
    return BatchEvent(id=f"evt_{digest}", created_at=ended_at or 0, type=kind, data=EventData(id=record.id))


def key_of(secret: str) -> bytes:
    """Return the key of a secret: base64 behind `whsec_`, any other text as it is. Raises ValueError for broken base64."""
    if not secret.startswith(SECRET_MARK):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(SECRET_MARK), validate=True)
    except binascii.Error:
        raise ValueError("webhook_secret is not base64 behind whsec_") from None


def signature(key: bytes, event_id: str, at: int, body: bytes) -> str:
    """Return the header that signs an event."""
    made = hmac.new(key, f"{event_id}.{at}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(made).decode()}"
