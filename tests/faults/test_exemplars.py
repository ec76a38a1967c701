"""A real Prometheus takes the frontend's metrics as OpenMetrics, with trace ids beside the times and OpenTelemetry's names."""

from __future__ import annotations

import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_dashboards import PROMETHEUS, Prometheus, chat, fetch, scraped
from tests.support.otlp_receiver import otlp_receiver
from tests.support.up_process import routed_up

pytestmark = [
    pytest.mark.fault,
    pytest.mark.deployment,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not here: `make monitors` unpacks it"),
]

SHOWN = ("headrace_frontend_time_to_first_token_seconds", "headrace_frontend_request_seconds")
OPENTELEMETRYS = ("request_duration", "time_to_first_token", "time_per_output_token")


def traces_of(prometheus: Prometheus, metric: str) -> set[str]:
    """The traces that Prometheus has stored beside the buckets of a metric."""
    now = time.time()
    asked = urllib.parse.urlencode({"query": f"{metric}_bucket", "start": now - 600, "end": now + 60})
    found: list[dict[str, Any]] = fetch(f"{prometheus.url}/api/v1/query_exemplars?{asked}")["data"]
    return {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}


def test_prometheus_stores_the_traces_that_the_receiver_got(tmp_path: Path) -> None:
    with (
        otlp_receiver() as receiver,
        routed_up(tmp_path, "--workers", "1", "--trace-endpoint", receiver.url, "--trace-sample", "1") as running,
        scraped(tmp_path, running) as prometheus,
    ):
        for number in range(4):
            chat(running.state()["url"], number, 8)
        for metric in SHOWN:
            running.until(f"exemplars of {metric}", lambda metric=metric: bool(traces_of(prometheus, metric)))
        running.until("the traces", lambda: len({span.trace for span in receiver.spans}) >= 4)
        assert {trace for metric in SHOWN for trace in traces_of(prometheus, metric)} <= {span.trace for span in receiver.spans}
        for name in OPENTELEMETRYS:
            query = f'sum by (gen_ai_request_model) (gen_ai_server_{name}_seconds_count{{gen_ai_operation_name="chat"}}) > 0'
            running.until(f"data of {name}", lambda query=query: prometheus.has_data(query))
