"""Sends spans by OTLP over HTTP, with the client of OpenTelemetry's own exporter, from a thread. Needs the extra `otel`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

from headrace.frontend.errors import TracingUnusable
from headrace.frontend.tracing.otlp_bytes import encode
from headrace.frontend.tracing.spans import SpanData

EXPORT_S = 10.0


class OtlpExporter:
    """Sends spans to one address. Each service that took part in a request is a resource of its own."""

    def __init__(self, endpoint: str) -> None:
        """Raises TracingUnusable for an address that is none, and where the packages are missing or not known."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TracingUnusable(f"frontend.trace_endpoint: {endpoint!r} is no http:// or https:// address")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise TracingUnusable("frontend.trace_endpoint needs OpenTelemetry: pip install 'headrace[otel]'") from None
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._post = post_of(self._exporter)
        self._version = metadata.version("headrace")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="traces")

    async def export(self, spans: Sequence[SpanData]) -> bool:
        """Send spans; False if the receiver did not take them in time."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._send, spans)

    def _send(self, spans: Sequence[SpanData]) -> bool:
        try:
            return self._post(encode(spans, self._version))
        except Exception:  # whatever a library does: traces are worth no request
            return False

    async def close(self) -> None:
        """Close the connection. What was not sent is lost."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._exporter.shutdown()


def post_of(exporter: Any) -> Callable[[bytes], bool]:
    """Return what sends an encoded message with the exporter's address, headers, certificates, compression and retries.

    Its public method takes only spans as objects, which cost more than all else. Raises TracingUnusable for a version of the
    package that keeps its client elsewhere.
    """
    client: Any = getattr(exporter, "_client", None)
    if client is not None and hasattr(client, "export"):
        return lambda data: bool(client.export(data).success)
    if hasattr(exporter, "_export"):  # of earlier versions
        export = getattr(exporter, "_export")  # noqa: B009
        return lambda data: bool(export(data).ok)
    version = metadata.version("opentelemetry-exporter-otlp-proto-http")
    raise TracingUnusable(f"frontend.trace_endpoint: opentelemetry-exporter-otlp-proto-http {version} is not known, use 1.45")
