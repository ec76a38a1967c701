"""Builds the tracer that the settings ask for."""

from __future__ import annotations

from headrace.frontend.metrics import Metrics
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.tracing.tracer import Tracer


def tracer_of(settings: FrontendSettings, metrics: Metrics, *, frontend: str) -> Tracer | None:
    """Return the tracer of a frontend with this id, None without an endpoint. Raises TracingUnusable."""
    if settings.trace_endpoint is None:
        return None
    from headrace.frontend.tracing.otlp import OtlpExporter  # OpenTelemetry is imported for those who use it

    exporter = OtlpExporter(settings.trace_endpoint)
    return Tracer(exporter, metrics, sample=settings.trace_sample, frontend=frontend)
