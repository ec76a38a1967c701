"""Receives traces by OTLP over HTTP, as any tracing back end does, and decodes them by OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass
class Received:
    """A span as it came, with its service and instance. Ids are hex."""

    name: str
    service: str
    instance: str
    trace: str
    id: str
    parent: str
    begin_ns: int
    end_ns: int
    links: list[str]
    failed: bool
    attributes: dict[str, Any]


@dataclass
class OtlpReceiver:
    """What was received so far. `status` is what the next requests are answered."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    status: int = 200

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        if self.status == 200:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = _values(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self.spans += [_received(span, about) for span in scope.spans]


def _values(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def _received(span: Any, about: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        service=about["service.name"],
        instance=about.get("service.instance.id", ""),  # others leave it out
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        links=[link.span_id.hex() for link in span.links],
        failed=span.status.code == 2,
        attributes=_values(span.attributes),
    )


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver on a free port of this machine."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.take(self.path, gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(receiver.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
