"""Sends spans by OTLP over HTTP, with OpenTelemetry's own exporter, from a thread. Needs the extra `otel`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

from headrace.frontend.errors import TracingUnusable
from headrace.frontend.tracing.spans import SpanData

EXPORT_S = 10.0


class OtlpExporter:
    """Sends spans to one address. Each service that took part in a request is a resource of its own."""

    def __init__(self, endpoint: str) -> None:
        """Raises TracingUnusable for an address that is none, and where the packages are missing."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TracingUnusable(f"frontend.trace_endpoint: {endpoint!r} is no http:// or https:// address")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import SpanExportResult
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
            from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
        except ImportError:
            raise TracingUnusable("frontend.trace_endpoint needs OpenTelemetry: pip install 'headrace[otel]'") from None
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._success = SpanExportResult.SUCCESS
        self._version = metadata.version("headrace")

        class KnownResource(Resource):  # type: ignore[misc]  # it is imported only where it is used
            """A resource that is looked up by what it is: OpenTelemetry's own writes all of it as JSON at each look-up."""

            __hash__ = object.__hash__
            __eq__ = object.__eq__

        scope = InstrumentationScope("headrace", self._version)
        kinds = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL, "consumer": SpanKind.CONSUMER}
        sampled = TraceFlags(TraceFlags.SAMPLED)
        resources: dict[tuple[str, str], Any] = {}

        def resource(service: str, instance: str) -> Any:
            key = service, instance
            if key not in resources:
                if len(resources) >= 1024:  # workers come and go
                    resources.clear()
                resources[key] = KnownResource(
                    {"service.name": service, "service.instance.id": instance, "service.version": self._version}
                )
            return resources[key]

        def convert(span: SpanData) -> Any:
            def context(span_id: int, *, remote: bool = False) -> SpanContext:
                return SpanContext(span.trace, span_id, is_remote=remote, trace_flags=sampled)

            return sdk.ReadableSpan(
                span.name,
                context=context(span.id),
                parent=context(span.parent, remote=span.remote_parent) if span.parent else None,
                resource=resource(span.service, span.instance),
                attributes=dict(span.attributes),
                links=[Link(context(link)) for link in span.links],
                kind=kinds[span.kind],
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
                start_time=span.begin_ns,
                end_time=span.end_ns,
                instrumentation_scope=scope,
            )

        self._convert = convert
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="traces")

    async def export(self, spans: Sequence[SpanData]) -> bool:
        """Send spans; False if the receiver did not take them in time."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._send, spans)

    def _send(self, spans: Sequence[SpanData]) -> bool:
        try:
            return bool(self._exporter.export([self._convert(span) for span in spans]) == self._success)
        except Exception:  # whatever a library does: traces are worth no request
            return False

    async def close(self) -> None:
        """Close the connection. What was not sent is lost."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._exporter.shutdown()
