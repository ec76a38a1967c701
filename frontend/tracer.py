"""Traces of requests: which ones are kept, and their export over OTLP as protobuf.

OpenTelemetry's own objects are not used: building and encoding them costs several times as much, while requests wait. The
field numbers are those of `opentelemetry/proto/trace/v1/trace.proto`; a test reads the bytes with OpenTelemetry's classes.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import metadata
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.broker.ingress.timeline import RequestTimeline
from headrace.frontend import spans as names
from headrace.frontend.errors import TracingUnusable
from headrace.frontend.metrics import Metrics
from headrace.frontend.request_audit import RequestSummary
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.spans import NS, SpanData, TraceContext, Value, new_context, new_span_id, read_context, spans_of_story

_HASHABLE = (str, int, float)
_KINDS = {"internal": 1, "server": 2, "consumer": 5}
_ERROR = 2
_KNOWS_REMOTE, _IS_REMOTE = 0x100, 0x200  # flags: the next bit is known; the parent or the linked span is in another process
_fixed64 = struct.Struct("<BQBQ").pack
_fixed32 = struct.Struct("<I").pack
_double = struct.Struct("<d").pack


def encode(spans: Sequence[SpanData], version: str) -> bytes:
    """Return the message with these spans, grouped by the service that they belong to."""
    by_service: dict[tuple[str, str], list[bytes]] = {}
    for span in spans:
        by_service.setdefault((span.service, span.instance), []).append(_span(span))
    parts: list[bytes] = []
    for (service, instance), found in by_service.items():
        scope_spans = _scope(version) + b"".join(found)
        resource_spans = _resource(service, instance, version) + b"\x12" + _varint(len(scope_spans)) + scope_spans
        parts.append(b"\x0a" + _varint(len(resource_spans)) + resource_spans)
    return b"".join(parts)


def _span(span: SpanData) -> bytes:
    trace = span.trace.to_bytes(16, "big")
    parts = [b"\x0a\x10", trace, b"\x12\x08", span.id.to_bytes(8, "big")]
    if span.parent:
        parts += (b"\x22\x08", span.parent.to_bytes(8, "big"))
    parts += (
        _text(b"\x2a", span.name),
        b"\x30%c" % _KINDS[span.kind],
        _fixed64(0x39, span.begin_ns, 0x41, span.end_ns),
    )
    for name, value in span.attributes.items():
        parts.append(_kept(name, value) if isinstance(value, _HASHABLE) else _attribute(b"\x4a", name, value))
    for link in span.links:
        parts += (b"\x6a\x21\x0a\x10", trace, b"\x12\x08", link.to_bytes(8, "big"), b"\x35", _fixed32(_KNOWS_REMOTE))
    if span.error:
        status = _text(b"\x12", span.error) + b"\x18%c" % _ERROR
        parts += (b"\x7a", _varint(len(status)), status)
    parts += (b"\x85\x01", _fixed32(_KNOWS_REMOTE | _IS_REMOTE if span.remote_parent else _KNOWS_REMOTE))
    body = b"".join(parts)
    return b"\x12" + _varint(len(body)) + body


@lru_cache(maxsize=8192, typed=True)  # most values come again: in the spans of one request, or in all
def _kept(name: str, value: str | float) -> bytes:
    return _attribute(b"\x4a", name, value)


def _attribute(field: bytes, name: str, value: Value) -> bytes:
    encoded = _value(value)
    pair = _key(name) + b"\x12" + _varint(len(encoded)) + encoded
    return field + _varint(len(pair)) + pair


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _text(b"\x0a", value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & (2**64 - 1))
    if isinstance(value, float):
        return b"\x21" + _double(value)
    items = [_text(b"\x0a", item) for item in value]
    body = b"".join([b"\x0a" + _varint(len(item)) + item for item in items])
    return b"\x2a" + _varint(len(body)) + body


def _text(field: bytes, text: str) -> bytes:
    data = text.encode(errors="replace")
    return field + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SMALL[number]
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_SMALL = [bytes([number]) for number in range(0x80)]


@lru_cache(maxsize=256)
def _key(name: str) -> bytes:
    return _text(b"\x0a", name)


@lru_cache(maxsize=1024)
def _resource(service: str, instance: str, version: str) -> bytes:
    about = {"service.name": service, "service.instance.id": instance, "service.version": version}
    body = b"".join([_attribute(b"\x0a", name, value) for name, value in about.items()])
    return b"\x0a" + _varint(len(body)) + body


@lru_cache(maxsize=4)
def _scope(version: str) -> bytes:
    body = _text(b"\x0a", "headrace") + _text(b"\x12", version)
    return b"\x0a" + _varint(len(body)) + body


# Sends spans by OTLP over HTTP, with the client of OpenTelemetry's own exporter, from a thread. Needs the extra `otel`.

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


# Decides which requests are traced, and turns those that have ended into spans, away from the path of requests.
#
# An untraced request costs a context and the look at how it ended. A request is kept if it was sampled when it came, or if it
# ended in an error, moved, or was late by the targets: all that its spans need was heard anyway.

log = structlog.get_logger()

LATE_S = 1.0  # after the end: workers tell of their last steps in groups
EVERY_S = 0.5
MOST_WAITING = 4096  # ended requests whose spans are not made yet; more are dropped
MOST_AT_ONCE = 256  # of them in one export
COMPLAIN_EVERY_S = 60.0
CLIENT_GONE = "client_gone"
TOO_MANY_REQUESTS = 429


class Exporter(Protocol):
    async def export(self, spans: Sequence[SpanData]) -> bool:
        """Return whether they were taken. Must not raise."""

    async def close(self) -> None: ...


class Begun(msgspec.Struct, frozen=True):
    """The trace of a request that runs. `span` is that of the request here."""

    context: TraceContext
    span: int
    began_ns: int

    def headers(self) -> dict[str, str]:
        """Return the W3C headers for what works on the request."""
        return self.context.headers(self.span)


class _Ended(msgspec.Struct, frozen=True):
    """A request whose spans are to be made at `due_s` of the event loop's time."""

    due_s: float
    root: SpanData
    context: TraceContext
    timelines: Sequence[RequestTimeline]


class Tracer:
    """The traces of one frontend."""

    def __init__(
        self,
        exporter: Exporter,
        metrics: Metrics,
        *,
        sample: float,
        frontend: str,
        late_s: float = LATE_S,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """`sample`: the share of requests whose client does not say whether to trace them. `frontend`: the id in spans.

        `clock`: nanoseconds.
        """
        self._exporter = exporter
        self._metrics = metrics
        self._sample = sample
        self._frontend = frontend
        self._late_s = late_s
        self._clock_ns = clock
        self._waiting: deque[_Ended] = deque()
        self._outcomes = {
            outcome: metrics.traces.labels(outcome)
            for outcome in ("sampled", "kept", "not_sampled", "dropped", "exported", "failed")
        }
        self._complained_s = -COMPLAIN_EVERY_S

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> Begun:
        """Begin the trace of a request, below that of its client if its headers name one."""
        return Begun(read_context(headers) or new_context(self._sample), new_span_id(), self._clock_ns())

    def end(self, trace: Begun, scope: Any, *, route: str, status: int, code: str | None) -> None:
        """End the trace of a request, and keep it if it was sampled or its end is worth it."""
        summary: RequestSummary | None = scope.get("headrace.summary")
        if trace.context.sampled:
            outcome = "sampled"
        elif _went_wrong(status, code) or (summary is not None and _remarkable(summary)):
            outcome = "kept"
        else:
            self._outcomes["not_sampled"].inc()
            return
        self._outcomes[outcome].inc()
        if len(self._waiting) >= MOST_WAITING:
            self._outcomes["dropped"].inc()
            return
        root = self._root(trace, scope, summary, route=route, status=status, code=code)
        self._metrics.show_trace(
            root.trace,
            route=route,
            took_s=(root.end_ns - root.begin_ns) / NS,
            model=summary.model if summary is not None else "",
            first_token_s=summary.first_token_s if summary is not None else None,
        )
        due_s = asyncio.get_running_loop().time() + self._late_s
        self._waiting.append(_Ended(due_s, root, trace.context, summary.timelines if summary is not None else ()))

    def _root(
        self, trace: Begun, scope: Any, summary: RequestSummary | None, *, route: str, status: int, code: str | None
    ) -> SpanData:
        about: dict[str, Value] = {
            names.OPERATION: names.operation(route),
            names.PROVIDER: "headrace",
            names.METHOD: scope["method"],
            names.ROUTE: route,
            names.STATUS: status,
            names.REQUEST_ID: scope["headrace.request_id"],
        }
        if (client_id := scope.get("headrace.client_request_id")) is not None:
            about[names.CLIENT_REQUEST_ID] = client_id
        if code is not None:
            about[names.ERROR_TYPE] = code
        model = ""
        if summary is not None:
            fields = summary.fields()
            model = str(fields.get("model", ""))
            about |= {attribute: fields[name] for name, attribute in _FIELDS.items() if name in fields}
            if "finish_reason" in fields:
                about[names.FINISH_REASONS] = fields["finish_reason"].split(",")
            if summary.level is not None:
                about[names.LEVEL] = summary.level
        return SpanData(
            name=f"{names.operation(route)} {model}".rstrip(),
            trace=trace.context.trace,
            id=trace.span,
            parent=trace.context.span,
            remote_parent=trace.context.span != 0,
            begin_ns=trace.began_ns,
            end_ns=max(trace.began_ns, self._clock_ns()),
            service="headrace-frontend",
            instance=self._frontend,
            kind="server",
            attributes=about,
            error=(code or f"HTTP {status}") if _went_wrong(status, code) else "",
        )

    async def run(self) -> None:
        """Export until cancelled; then what waits is sent once."""
        try:
            while True:
                await asyncio.sleep(EVERY_S)
                while self._waiting and self._waiting[0].due_s <= asyncio.get_running_loop().time():
                    await self._export(self._take(asyncio.get_running_loop().time()))
        finally:
            if self._waiting:
                await self._export(self._take(float("inf")))
            await self._exporter.close()

    def _take(self, until_s: float) -> list[_Ended]:
        taken: list[_Ended] = []
        while self._waiting and len(taken) < MOST_AT_ONCE and self._waiting[0].due_s <= until_s:
            taken.append(self._waiting.popleft())
        return taken

    async def _export(self, ended: Sequence[_Ended]) -> None:
        spans: list[SpanData] = []
        for one in ended:
            spans.append(one.root)
            for timeline in one.timelines:
                if timeline.story is not None:
                    spans += spans_of_story(timeline.story, one.context, one.root.id, self._frontend)
        taken = await self._exporter.export(spans)
        self._outcomes["exported" if taken else "failed"].inc(len(ended))
        now_s = asyncio.get_running_loop().time()
        if not taken and now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            log.warning("traces.not_exported", traces=len(ended), spans=len(spans))


_FIELDS = {
    "model": names.REQUEST_MODEL,
    "tenant": names.TENANT,
    "class": names.REQUEST_CLASS,
    "prompt_tokens": names.INPUT_TOKENS,
    "cached_tokens": names.CACHED_TOKENS,
    "completion_tokens": names.OUTPUT_TOKENS,
    "ttft_s": names.FIRST_CHUNK_S,
    "attempts": names.ATTEMPTS,
}


def _went_wrong(status: int, code: str | None) -> bool:
    """Return True for an error of the server, also one that ended a stream; a refusal for a client's own mistake is none."""
    return status >= 500 or (code is not None and code != CLIENT_GONE and (status < 400 or status == TOO_MANY_REQUESTS))


def _remarkable(summary: RequestSummary) -> bool:
    return summary.level not in (None, "met") or summary.attempts > 1


def traced(app: ASGIApp, tracer: Tracer, route: str) -> ASGIApp:
    """Return an application that traces every request of one route.

    The application below finds the trace in the scope, and leaves there how the request ended.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        trace = scope["headrace.trace"] = tracer.begin(scope["headers"])
        try:
            await app(scope, receive, send)
        finally:
            code = scope.get("headrace.outcome")
            tracer.end(trace, scope, route=route, status=scope.get("headrace.status", 0), code=code)

    return answer


def tracer_of(settings: FrontendSettings, metrics: Metrics, *, frontend: str) -> Tracer | None:
    """Return the tracer of a frontend with this id, None without an endpoint. Raises TracingUnusable."""
    if settings.trace_endpoint is None:
        return None

    exporter = OtlpExporter(settings.trace_endpoint)
    return Tracer(exporter, metrics, sample=settings.trace_sample, frontend=frontend)
