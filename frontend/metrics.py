"""Declares all metrics of the HTTP surface, in one registry per application, so that two in one process do not mix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from prometheus_client import REGISTRY, CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from headrace.base.metrics import Counter, Gauge
from headrace.frontend.gen_ai_metrics import GenAiMetrics
from headrace.frontend.histogram import BYTES, FastHistogram
from headrace.frontend.tenant_metrics import TenantMetrics

Source = Literal["request", "job"]
Level = Literal["met", "first_token_late", "tokens_late", "failed"]  # of service

OPEN_METRICS = "application/openmetrics-text"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ProcessMetrics(Collector):
    """Collects Headrace's metrics from the registry of the process: the ingress's half of the job protocol, the connection."""

    def collect(self) -> Iterable[Metric]:
        return (family for family in REGISTRY.collect() if family.name.startswith("headrace_"))

    def describe(self) -> Iterable[Metric]:
        return ()


class Metrics:
    """The metrics and the registry they are in."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = r = registry or CollectorRegistry()
        ProcessCollector(registry=r)
        r.register(ProcessMetrics())
        self.requests = Counter(
            "headrace_frontend_requests", "Answered HTTP requests by route and status", ["route", "status"], registry=r
        )
        self.in_flight = Gauge("headrace_frontend_requests_in_flight", "HTTP requests being answered", registry=r)
        self.disconnects = Counter(
            "headrace_frontend_disconnects", "Clients that left before their answer was complete", registry=r
        )
        self.slow_clients = Counter(
            "headrace_frontend_slow_clients", "Answers that were cut because their client did not read them", registry=r
        )
        by = ["model", "source"]
        self.prompt_tokens = Counter(
            "headrace_frontend_prompt_tokens", "Prompt tokens of ended requests and stored jobs", by, registry=r
        )
        self.cached_tokens = Counter(
            "headrace_frontend_cached_tokens", "Those of them that were found in a KV cache", by, registry=r
        )
        self.output_tokens = Counter(
            "headrace_frontend_output_tokens", "Output tokens of ended requests and stored jobs", by, registry=r
        )
        self.stored = Counter(
            "headrace_frontend_stored_responses", "Responses that were to be stored, by how it went", ["outcome"], registry=r
        )
        self.not_offered = Counter(
            "headrace_frontend_tools_not_offered",
            "Tools that nothing here runs and that the model was not offered, by their type",
            ["kind"],
            registry=r,
        )
        self.duration = FastHistogram(
            r, "headrace_frontend_request_seconds", "From the request to its last byte", labels=("route",)
        )
        self.first_token = FastHistogram(
            r, "headrace_frontend_time_to_first_token_seconds", "From the request to its first token", labels=("model",)
        )
        self.gap = FastHistogram(
            r, "headrace_frontend_inter_token_seconds", "Between tokens as they leave for the client", labels=("model",)
        )
        self.gen_ai = GenAiMetrics(r)
        self.tenants = TenantMetrics(r)
        self.levels = Counter(
            "headrace_frontend_sla_requests",
            "Answers by the targets: met, first_token_late, tokens_late, or failed for no fault of the client",
            ["model", "result"],
            registry=r,
        )
        self.prepare = FastHistogram(r, "headrace_frontend_prepare_seconds", "Checking, templating and tokenising a request")
        self.body_bytes = FastHistogram(r, "headrace_frontend_request_bytes", "Size of request bodies", bounds=BYTES)

        self.prefix_tokens = Counter(
            "headrace_frontend_prefix_tokens",
            "Tokens of long prompts: known from earlier ones, or made new",
            ["kind"],
            registry=r,
        )
        self.prefix_prompts = Counter(
            "headrace_frontend_prefix_prompts",
            "Long prompts of which something was known (hit), or nothing",
            ["result"],
            registry=r,
        )
        self.prefix_bytes = Gauge("headrace_frontend_prefix_bytes", "Memory of earlier prompts' tokens and hashes", registry=r)
        self.slow_prompts = Counter(
            "headrace_frontend_slow_prompts", "Texts that the fast tokenizer refused and the reference encoded", registry=r
        )
        self._prefix = [self.prefix_tokens.labels(kind) for kind in ("reused", "encoded")]
        self._prefix_hit, self._prefix_miss = (self.prefix_prompts.labels(result) for result in ("hit", "miss"))
        self.loop_lag = FastHistogram(
            r, "headrace_frontend_loop_lag_seconds", "How late the event loop was, looked at twenty times a second"
        )
        self.connections = Gauge("headrace_frontend_connections", "Open HTTP connections", registry=r)
        self.traces = Counter(
            "headrace_frontend_traces",
            "Traces of requests, where they are made: sampled, kept for their end, not sampled, dropped, exported, failed",
            ["outcome"],
            registry=r,
        )
        self.audit_records = Counter(
            "headrace_frontend_audit_records", "Records for the audit stream: written, dropped", ["outcome"], registry=r
        )
        self.arriving_bytes = Gauge(
            "headrace_frontend_arriving_body_bytes", "Memory of bodies that are still arriving", registry=r
        )
        self.connections_shed = Counter(
            "headrace_frontend_connections_shed", "Idle connections closed to make room for new ones", registry=r
        )
        self.connections_refused = Counter(
            "headrace_frontend_connections_refused", "Connections closed for what they sent or failed to", ["code"], registry=r
        )

        self._answered: dict[tuple[str, int], Counter] = {}
        self._levels: dict[tuple[str, Level], Counter] = {}
        self._tokens: dict[tuple[str, Source], tuple[Counter, ...]] = {}

    # Looking up a labelled metric costs several times as much as counting, so the few label values are kept.

    def answered(self, route: str, status: int) -> None:
        """Count one answered request. Status 0 means that none was sent."""
        counter = self._answered.get((route, status))
        if counter is None:
            counter = self._answered[route, status] = self.requests.labels(route, status or "none")
        counter.inc()

    def count_level(self, model: str, level: Level) -> None:
        """Count one answer under the service level that it had."""
        counter = self._levels.get((model, level))
        if counter is None:
            counter = self._levels[model, level] = self.levels.labels(model, level)
        counter.inc()

    def count_tokens(self, model: str, *, prompt: int, cached: int, output: int, source: Source = "request") -> None:
        """Count the tokens of one ended request or stored job."""
        counters = self._tokens.get((model, source))
        if counters is None:
            kinds = (self.prompt_tokens, self.cached_tokens, self.output_tokens)
            counters = self._tokens[model, source] = tuple(kind.labels(model, source) for kind in kinds)
        for counter, count in zip(counters, (prompt, cached, output), strict=True):
            counter.inc(count)

    def count_prefix(self, reused: int, encoded: int) -> None:
        """Count one long prompt. May be called from any thread."""
        for counter, tokens in zip(self._prefix, (reused, encoded), strict=True):
            counter.inc(tokens)
        (self._prefix_hit if reused else self._prefix_miss).inc()

    def show_trace(self, trace: int, *, route: str, took_s: float, model: str, first_token_s: float | None) -> None:
        """Name the trace of an ended request as an exemplar of its times. `model` is empty where none was found."""
        self.duration.series(route).show(took_s, trace)
        if first_token_s is not None:
            self.first_token.series(model).show(first_token_s, trace)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def render_for(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics where the scraper accepts that, else the text format."""
        if OPEN_METRICS not in accept:
            return self.render(), CONTENT_TYPE
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
