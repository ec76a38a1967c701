"""Metrics of the HTTP surface, in one registry per application, so that two in one process do not mix."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from prometheus_client import REGISTRY, CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import Exemplar, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from headrace.base.metrics import Counter, Gauge
from headrace.broker.metrics import OTHER

# A Prometheus histogram that is cheap enough for one observation per streamed event.
#
# prometheus_client takes a lock and two method calls per observation, which is too much on the token path. This histogram
# belongs to one event loop: an observation is a bisect and two additions.

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
BYTES = (256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)


class Series:
    """The observations under one value of each label. `exemplars`: by bucket, the last one."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def show(self, value: float, trace: int) -> None:
        """Name the trace of an observation, for scrapers that take OpenMetrics. The last one of each bucket is shown."""
        shown = Exemplar({"trace_id": f"{trace:032x}"}, value, time.time())
        self.exemplars[bisect_left(self._bounds, value)] = shown


class FastHistogram(Collector):
    """A histogram. Not thread-safe."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        help_text: str,
        *,
        labels: Sequence[str] = (),
        bounds: Sequence[float] = SECONDS,
    ):
        self._name = name
        self._help = help_text
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def series(self, *values: str) -> Series:
        """Return the series of these label values. Callers that observe often keep it."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Series(self._bounds)
        return found

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, series in self._series.items():
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            running = 0
            for number, count in enumerate(series.counts):
                running += count
                bound = str(float(self._bounds[number])) if number < len(self._bounds) else "+Inf"
                shown = series.exemplars.get(number)
                buckets.append((bound, running) if shown is None else (bound, running, shown))
            family.add_metric(values, buckets, series.total)
        yield family


# The metrics of OpenTelemetry's GenAI conventions for model servers: names, labels and buckets, which nothing else has.
#
# The conventions are in development, and name no metric of Prometheus. Here the dots are underscores and the unit ends the
# name, as the specification of OpenTelemetry maps them.

PROVIDER = "headrace"
LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
DURATION_S = tuple(0.01 * 2**power for power in range(14))  # to 81.92
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
OUTPUT_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class GenAiMetrics:
    """The three histograms. Each generating request is observed once, when it has ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, meaning: str, bounds: Sequence[float], *more: str) -> FastHistogram:
            return FastHistogram(registry, name, meaning, labels=(*LABELS, *more), bounds=bounds)

        self.duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "From a generating request to its last byte; error_type is its error's code, empty without one",
            DURATION_S,
            "error_type",
        )
        self.first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds", "From a request that was answered to its first token", FIRST_TOKEN_S
        )
        self.output_token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time per token after the first of a request that was answered",
            OUTPUT_TOKEN_S,
        )
        self._series: dict[tuple[str, str], tuple[Series, Series, Series]] = {}

    def series(self, operation: str, model: str) -> tuple[Series, Series, Series]:
        """Return the series of answered requests: duration, first token, output token."""
        found = self._series.get((operation, model))
        if found is None:
            labels = (operation, PROVIDER, model)
            found = self._series[operation, model] = (
                self.duration.series(*labels, ""),
                self.first_token.series(*labels),
                self.output_token.series(*labels),
            )
        return found

    def answered(
        self, operation: str, model: str, *, took_s: float, first_token_s: float | None, per_token_s: float | None
    ) -> None:
        """Observe an answer. It has no first token where it is a vector, and no time per token where it has only one."""
        duration, first, rest = self.series(operation, model)
        duration.observe(took_s)
        if first_token_s is not None:
            first.observe(first_token_s)
        if per_token_s is not None:
            rest.observe(per_token_s)

    def failed(self, operation: str, model: str, code: str, *, took_s: float) -> None:
        """Observe a request for a served model that ended in an error."""
        self.duration.series(operation, PROVIDER, model, code).observe(took_s)


# The metrics of tenants where keys are in force: requests, tokens, times to the first token, refusals by quotas.
#
# Tenants of keys have series of their own, up to a limit, in the order in which they come; all others share one. A name that
# is in a header, and is no key's tenant, is never a label. A request is counted once, when it has ended.

QUOTA = "rate_limit_exceeded"


class TenantSeries:
    __slots__ = ("_by_status", "_requests", "first_s", "firsts", "output", "prompt", "refused", "tenant")

    def __init__(self, tenant: str, requests: Counter, *others: Counter) -> None:
        self.tenant = tenant
        self._requests = requests
        self._by_status: dict[int, Counter] = {}
        self.prompt, self.output, self.first_s, self.firsts, self.refused = (other.labels(tenant) for other in others)

    def answered(self, status: int) -> None:
        """Count a request by the class of its status; 0 means that none was sent."""
        kind = status // 100
        counter = self._by_status.get(kind)
        if counter is None:
            counter = self._by_status[kind] = self._requests.labels(self.tenant, f"{kind}xx" if kind else "none")
        counter.inc()

    def used(self, prompt: int, output: int) -> None:
        """Count the tokens of a request or a stored job."""
        self.prompt.inc(prompt)
        self.output.inc(output)


class TenantMetrics:
    """The series of all tenants of one frontend. Nothing is counted before `hold`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *more: str) -> Counter:
            return Counter(f"headrace_frontend_tenant_{name}", meaning, ["tenant", *more], registry=registry)

        self._counters = (
            counter("requests", "Answered HTTP requests of tenants of keys, by the class of their status", "status"),
            counter("prompt_tokens", "Prompt tokens of ended requests and stored jobs of tenants of keys"),
            counter("output_tokens", "Output tokens of ended requests and stored jobs of tenants of keys"),
            counter("first_token_seconds", "Sum of the times from a request of a tenant of keys to its first token"),
            counter("first_tokens", "Requests of tenants of keys that had a first token"),
            counter("quota_refusals", "Requests refused because their key or its tenant has used what it may"),
        )
        self._most = 0
        self._known: Callable[[str], bool] = lambda _tenant: False
        self._series: dict[str, TenantSeries] = {}
        self._other: TenantSeries | None = None

    def hold(self, most: int, known: Callable[[str], bool]) -> None:
        """Give at most `most` tenants series of their own. `known(tenant)`: a stored key has this tenant."""
        self._most, self._known = most, known

    def of(self, tenant: str, *, own: bool) -> TenantSeries:
        """Return the series of a tenant. `own`: a key of it was used just now."""
        found = self._series.get(tenant)
        if found is None:
            if len(self._series) < self._most and (own or self._known(tenant)):
                found = self._series[tenant] = TenantSeries(tenant, *self._counters)
            else:
                found = self._other = self._other or TenantSeries(OTHER, *self._counters)
        return found


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

        self._answered: dict[tuple[str, int], tuple[Counter, Series]] = {}
        self._levels: dict[tuple[str, Level], Counter] = {}
        self._tokens: dict[tuple[str, Source], tuple[Counter, ...]] = {}

    # Looking up a labelled metric costs several times as much as counting, so the few label values are kept.

    def answered(self, route: str, status: int, took_s: float) -> None:
        """Count one answered request. Status 0 means that none was sent."""
        found = self._answered.get((route, status))
        if found is None:
            found = self._answered[route, status] = self.requests.labels(route, status or "none"), self.duration.series(route)
        counter, duration = found
        counter.inc()
        duration.observe(took_s)

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
        return generate_latest(self.registry)

    def render_for(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics where the scraper accepts that, else the text format."""
        if OPEN_METRICS not in accept:
            return self.render(), CONTENT_TYPE
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
