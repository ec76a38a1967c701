"""Encoded spans are read by OpenTelemetry's own classes as they were meant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.broker.errors import JobFailed, Overloaded
from headrace.broker.jobs import Job
from headrace.frontend import spans as names
from headrace.frontend import tracer as module
from headrace.frontend.metrics import Metrics
from headrace.frontend.spans import SpanData
from headrace.frontend.tracer import Tracer, encode
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, Step, frontend, row

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


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Receiver:
    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.spans: list[SpanData] = []
        self.exports = 0
        self.closed = False

    async def export(self, spans: Sequence[SpanData]) -> bool:
        self.exports += 1
        self.spans += spans
        return self.takes

    async def close(self) -> None:
        self.closed = True


class Bench:
    """A frontend whose chats are traced into a list."""

    def __init__(self, ingress: FakeIngress | None = None, *, sample: float = 1.0, takes: bool = True, **settings: Any) -> None:
        self.ingress = ingress or FakeIngress()
        self.receiver = Receiver(takes)
        self.metrics = Metrics()
        self.tracer = Tracer(self.receiver, self.metrics, sample=sample, frontend="i", late_s=0.0)
        with mock.patch("headrace.frontend.app.tracer_of", return_value=self.tracer):
            self.app = frontend(self.ingress, **settings).app

    async def chat(self, **headers: str) -> None:
        body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        await Call(self.app, "/v1/chat/completions", body, headers=headers).run()

    async def exported(self) -> list[SpanData]:
        running = asyncio.ensure_future(self.tracer.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert self.receiver.closed
        return self.receiver.spans

    def count(self, outcome: str) -> float:
        value = self.metrics.traces.labels(outcome)._value.get()
        assert isinstance(value, float)
        return value


async def test_a_sampled_request_is_a_span_below_that_of_its_client() -> None:
    bench = Bench(sample=0.0)
    await bench.chat(traceparent=PARENT, tracestate="a=1", **{"x-request-id": "mine"})
    (span,) = await bench.exported()
    assert (f"{span.trace:032x}", f"{span.parent:016x}", span.remote_parent) == (*PARENT.split("-")[1:3], True)
    assert (span.name, span.kind, span.error) == (f"chat {MODEL}", "server", "")
    assert 0 < span.begin_ns <= span.end_ns
    about = dict(span.attributes)
    assert about.pop(names.FIRST_CHUNK_S)
    assert about.pop(names.REQUEST_ID) == bench.ingress.jobs[0].id
    assert about == {
        names.OPERATION: "chat",
        names.PROVIDER: "headrace",
        names.REQUEST_MODEL: MODEL,
        names.CLIENT_REQUEST_ID: "mine",
        names.METHOD: "POST",
        names.ROUTE: "/v1/chat/completions",
        names.STATUS: 200,
        names.LEVEL: "met",
        names.TENANT: "_",
        names.REQUEST_CLASS: "std",
        names.CACHED_TOKENS: 0,
        names.OUTPUT_TOKENS: 2,
        names.INPUT_TOKENS: bench.ingress.jobs[0].prompt_tokens,
    }


async def test_what_computes_a_request_learns_of_its_span() -> None:
    bench = Bench()
    await bench.chat(traceparent=PARENT, tracestate="a=1")
    (span,) = await bench.exported()
    (job,) = bench.ingress.jobs
    assert job.trace == {"traceparent": f"00-{span.trace:032x}-{span.id:016x}-01", "tracestate": "a=1"}
    assert job.envelope(judge="j", now=0.0, payload=b"", spill=None).trace == job.trace


async def test_no_span_has_the_words_of_a_prompt_or_an_answer() -> None:
    bench = Bench()
    await bench.chat()
    (span,) = await bench.exported()
    assert "Hello" not in repr(span)
    assert "hi" not in [str(value) for value in span.attributes.values()]


async def test_a_request_that_is_not_sampled_and_went_well_leaves_nothing() -> None:
    bench = Bench(sample=0.0)
    await bench.chat()
    await bench.chat(traceparent=PARENT[:-1] + "0")
    assert await bench.exported() == []
    assert bench.receiver.exports == 0
    assert bench.count("not_sampled") == 2


async def test_errors_are_kept_whether_sampled_or_not() -> None:
    refused = FakeIngress()
    refused.refusal = Overloaded("full")

    def breaks(_: Job) -> Iterable[Step]:
        yield [row("a")]
        yield JobFailed("engine_error", "broken")

    for ingress in (refused, FakeIngress(breaks)):
        bench = Bench(ingress, sample=0.0)
        await bench.chat()
        (span,) = await bench.exported()
        assert span.error == span.attributes[names.ERROR_TYPE] != ""
        assert bench.count("kept") == 1


async def test_late_answers_are_kept() -> None:
    bench = Bench(sample=0.0, target_first_token_s=1e-9)
    await bench.chat()
    (span,) = await bench.exported()
    assert (span.attributes[names.LEVEL], span.error) == ("first_token_late", "")


async def test_a_client_s_own_mistake_is_not_kept() -> None:
    bench = Bench(sample=0.0)
    await Call(bench.app, "/v1/chat/completions", b"{").run()
    assert await bench.exported() == []


async def test_a_receiver_that_takes_nothing_is_counted() -> None:
    bench = Bench(takes=False)
    await bench.chat()
    await bench.exported()
    assert (bench.count("sampled"), bench.count("failed"), bench.count("exported")) == (1, 1, 0)


async def test_more_than_can_wait_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    bench = Bench()
    for _ in range(5):
        await bench.chat()
    assert len(await bench.exported()) == 2
    assert (bench.count("sampled"), bench.count("dropped"), bench.count("exported")) == (5, 3, 2)


def exemplars(metrics: Metrics) -> dict[str, list[tuple[float, str, float]]]:
    """By histogram, the exemplars that a scraper of OpenMetrics gets: bound of the bucket, trace, value."""
    body, _ = metrics.render_for("application/openmetrics-text; version=1.0.0")
    found: dict[str, list[tuple[float, str, float]]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if sample.exemplar is not None:
                shown = sample.exemplar
                found.setdefault(family.name, []).append(
                    (float(sample.labels["le"]), shown.labels["trace_id"], float(shown.value))
                )
    return found


async def test_the_times_of_a_traced_request_name_its_trace_to_scrapers_of_openmetrics() -> None:
    bench = Bench(sample=0.0)
    await bench.chat(traceparent=PARENT)
    found = exemplars(bench.metrics)
    assert set(found) == {"headrace_frontend_time_to_first_token_seconds", "headrace_frontend_request_seconds"}
    for ((bound, trace, value),) in found.values():
        assert trace == PARENT.split("-")[1]
        assert value <= bound
    plain, _ = bench.metrics.render_for("text/plain")
    assert b"trace_id" not in plain


async def test_a_request_that_is_not_traced_leaves_no_exemplar() -> None:
    bench = Bench(sample=0.0)
    await bench.chat()
    assert exemplars(bench.metrics) == {}
