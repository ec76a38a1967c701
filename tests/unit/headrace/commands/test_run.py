"""The HTTP that orchestrators ask: real requests over loopback."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.broker.part_state import PartState, Standing
from headrace.commands.run import probe_port, serve_probes
from headrace.config.settings import load
from headrace.workers import metrics as worker_metrics

Ask = Callable[[str], tuple[int, Any]]


@pytest.fixture(scope="module")
def state() -> PartState:
    return PartState("worker")


@pytest.fixture(scope="module")
def port(state: PartState) -> int:
    return serve_probes("127.0.0.1", 0, state)


@pytest.fixture
def ask(port: int) -> Ask:
    def ask(path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    return ask


def test_each_question_has_its_answer(state: PartState, ask: Ask) -> None:
    state.publish(Standing(ready=False, healthy=True, why="sleeps", facts={"role": "prefill"}))
    assert ask("/live") == (200, {"status": "alive"})
    assert ask("/ready") == (503, {"status": "not ready", "reason": "sleeps"})
    status, health = ask("/health?verbose=1")
    assert (status, health["role"], health["reason"]) == (200, "prefill", "sleeps")
    state.publish(Standing(ready=True, healthy=True))
    assert ask("/ready")[0] == 200


def test_metrics_are_beside_it_and_nothing_else_is(port: int, ask: Ask) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        assert b"# HELP" in answer.read()
    status, body = ask("/etc/passwd")
    assert status == 404
    assert "/live, /ready, /health, /metrics" in body["error"]


def test_an_engines_series_beside_ours_are_valid_openmetrics_for_a_scraper_that_asks_for_it(port: int) -> None:
    engines = Histogram("vllm:a_test_seconds", "Of an engine", ["engine"], registry=REGISTRY)
    engines.labels("0").observe(0.2)
    worker_metrics.KV_BLOCKS.labels("device", "0").set(3)
    asked = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"accept": asked})
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert answer.headers["content-type"].startswith("application/openmetrics-text")
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    finally:
        REGISTRY.unregister(engines)
    assert families["vllm:a_test_seconds"].type == "histogram"
    assert "headrace_worker_kv_blocks" in families


def test_a_client_that_says_nothing_keeps_no_other_waiting(port: int, ask: Ask) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        assert ask("/live")[0] == 200


def test_a_taken_port_is_an_error(port: int, state: PartState) -> None:
    with pytest.raises(OSError, match="in use"):
        serve_probes("127.0.0.1", port, state)


def test_a_pod_needs_the_address_alone() -> None:
    assert probe_port(load("worker", flags={"worker.engine": "sim"}), "worker") is None
    assert probe_port(load("worker", flags={"worker.metrics_host": "0.0.0.0"}), "worker") == 9100
    assert probe_port(load("router", flags={"router.metrics_host": "0.0.0.0"}), "router") == 9101
