"""Traces cost a deployment few calls more: an unsampled request next to none, a tenth of all sampled at most 3 %."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from headrace.frontend import tracer as module
from headrace.frontend.metrics import Metrics
from headrace.frontend.spans import SpanData, TraceContext
from headrace.frontend.tracer import OtlpExporter, Tracer, encode
from tests.simulation.cost.deployment import Cost, chat

pytest.importorskip("opentelemetry.sdk")

REQUESTS, TOKENS = 80, 16
UNSAMPLED = 40  # calls of a request
SHARE = 0.03  # of the calls of all processes


class ConvertOnly(OtlpExporter):
    """Encodes spans in the loop where calls are counted, and sends them nowhere."""

    async def export(self, spans: Sequence[SpanData]) -> bool:
        return bool(encode(spans, "1"))


class TracedCost(Cost):
    """Frontends that trace every `every`th request; 0: none, None: they have no tracer."""

    def __init__(self, every: int | None) -> None:
        super().__init__()
        self.tracer: Tracer | None = None
        self._every = every
        self._begun = 0
        self._running: asyncio.Task[None] | None = None

    def tracer_of(self, _settings: Any, metrics: Metrics, *, frontend: str) -> Tracer | None:
        if self._every is not None:
            exporter = ConvertOnly("http://127.0.0.1:9/v1/traces")
            self.tracer = Tracer(exporter, metrics, sample=0.0, frontend=frontend, late_s=0.0)
        return self.tracer

    def context(self, _share: float) -> TraceContext:
        self._begun += 1
        return TraceContext(self._begun, 0, bool(self._every) and self._begun % (self._every or 1) == 0)

    async def _client(self, connection: Any) -> None:
        if self.tracer is not None and self._running is None:
            self._running = asyncio.create_task(self.tracer.run())
        await super()._client(connection)


def calls(every: int | None) -> tuple[dict[str, float], float]:
    """Return the calls of a request by process, and how many traces were made."""
    cost = TracedCost(every)
    soon = patch.object(module, "EVERY_S", 0.02)  # spans are made while calls are counted
    with patch("headrace.frontend.app.tracer_of", cost.tracer_of), patch.object(module, "new_context", cost.context), soon:
        found = cost.calls([chat(number, TOKENS) for number in range(REQUESTS)])
    exported = 0.0 if cost.tracer is None else cost.tracer._outcomes["exported"]._value.get()
    return {name: sum(modules.values()) / REQUESTS for name, modules in found.items()}, exported


def test_a_request_that_is_not_sampled_costs_next_to_nothing() -> None:
    without, _ = calls(None)
    traced, exported = calls(0)
    assert exported == 0
    assert 0 < traced["frontend"] - without["frontend"] < UNSAMPLED
    assert traced["worker"] - without["worker"] < 1


def test_a_tenth_of_all_requests_traced_costs_a_deployment_little() -> None:
    without, _ = calls(None)
    traced, exported = calls(10)
    assert exported == REQUESTS // 10
    assert sum(traced.values()) < (1 + SHARE) * sum(without.values())
