"""Encoded spans are read by OpenTelemetry's own classes as they were meant."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.tracing.otlp_bytes import encode
from headrace.frontend.tracing.spans import SpanData

collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

BASE: dict[str, Any] = {"name": "chat m", "trace": 2**127 + 9, "id": 2**63 + 5, "parent": 0, "begin_ns": 10, "end_ns": 2**62}
OWN = SpanData(service="headrace-frontend", instance="i", **BASE)

ids = st.integers(1, 2**64 - 1)
values = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=300),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=200), max_size=3),
)


def read(*spans: SpanData) -> Any:
    return collector.ExportTraceServiceRequest.FromString(encode(spans, "1.2"))


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [item.string_value for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=200),
    st.dictionaries(st.text("abc._", min_size=1), values, max_size=8),
    st.lists(ids, max_size=3),
    ids,
    st.booleans(),
)
def test_every_field_is_read_back(name: str, attributes: dict[str, Any], links: list[int], parent: int, remote: bool) -> None:
    told = {**BASE, "name": name, "parent": parent, "attributes": attributes, "links": links, "remote_parent": remote}
    (resource,) = read(SpanData(service="headrace-worker", instance="w", error=name, kind="server", **told)).resource_spans
    about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert about == {"service.name": "headrace-worker", "service.instance.id": "w", "service.version": "1.2"}
    (scope,) = resource.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("headrace", "1.2")
    (span,) = scope.spans
    assert (int.from_bytes(span.trace_id), int.from_bytes(span.span_id)) == (BASE["trace"], BASE["id"])
    assert int.from_bytes(span.parent_span_id) == parent
    assert (span.name, span.kind) == (name, span.SPAN_KIND_SERVER)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (10, 2**62)
    assert [(pair.key, value_of(pair.value)) for pair in span.attributes] == list(attributes.items())
    assert [(int.from_bytes(link.trace_id), int.from_bytes(link.span_id)) for link in span.links] == [
        (BASE["trace"], link) for link in links
    ]
    assert (span.status.code, span.status.message) == ((2, name) if name else (0, ""))
    assert span.flags == (0x300 if remote else 0x100)


def test_a_root_has_no_parent_and_the_spans_of_a_service_are_together() -> None:
    worker = SpanData(service="headrace-worker", instance="w", **BASE)
    found = read(OWN, worker, OWN)
    assert [len(resource.scope_spans[0].spans) for resource in found.resource_spans] == [2, 1]
    assert found.resource_spans[0].scope_spans[0].spans[0].parent_span_id == b""


def test_a_lone_surrogate_does_not_cost_the_other_spans() -> None:
    broken = SpanData(service="headrace-frontend", instance="i", **{**BASE, "name": "\ud800"})
    names = [span.name for span in read(broken, OWN).resource_spans[0].scope_spans[0].spans]
    assert names == ["?", "chat m"]


def test_it_is_what_the_packages_of_opentelemetry_make_of_the_same_span() -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span: int, *, remote: bool = False) -> SpanContext:
        return SpanContext(BASE["trace"], span, is_remote=remote, trace_flags=TraceFlags(TraceFlags.DEFAULT))

    attributes = {"a": "text", "b": 7, "c": -1, "d": 0.5, "e": True, "f": ["x", "y"]}
    theirs = ReadableSpan(
        "chat m",
        context=context(BASE["id"]),
        parent=context(3, remote=True),
        resource=Resource({"service.name": "headrace-router", "service.instance.id": "i", "service.version": "1.2"}),
        attributes=attributes,
        links=[Link(context(4))],
        kind=SpanKind.CONSUMER,
        status=Status(StatusCode.ERROR, "why"),
        start_time=10,
        end_time=2**62,
        instrumentation_scope=InstrumentationScope("headrace", "1.2"),
    )
    told = {**BASE, "parent": 3, "remote_parent": True, "attributes": attributes, "links": [4], "error": "why"}
    ours = SpanData(service="headrace-router", instance="i", kind="consumer", **told)
    assert read(ours) == encode_spans([theirs])
