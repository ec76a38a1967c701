"""The metrics of OpenTelemetry's GenAI conventions for model servers: names, labels and buckets, which nothing else has.

The conventions are in development, and name no metric of Prometheus. Here the dots are underscores and the unit ends the name,
as the specification of OpenTelemetry maps them.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from headrace.frontend.histogram import FastHistogram, Series

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
