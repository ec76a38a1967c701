"""Encodes spans as OTLP's protobuf message `ExportTraceServiceRequest`, without objects of OpenTelemetry's packages.

Building and encoding those costs several times as much, and the interpreter does it while requests wait.  The field numbers are
those of `opentelemetry/proto/trace/v1/trace.proto`; a test reads what is written with OpenTelemetry's own classes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

from headrace.frontend.tracing.spans import SpanData, Value

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
