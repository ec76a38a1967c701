"""A vLLM that traces adds its span below that of the request."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from unittest import mock

import pytest

from tests.support.otlp_receiver import Received, otlp_receiver
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.deployment, pytest.mark.timeout(600)]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
START_S = 400.0


def test_the_span_of_vllm_is_a_child_of_the_request(tmp_path: Path, model_dir: Path) -> None:
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "500"}
    with otlp_receiver() as receiver:
        flags = ["--model", str(model_dir), "--trace-endpoint", receiver.url, "--trace-sample", "0"]
        flags += ["--engine-arg", f"otlp_traces_endpoint={receiver.url}", "--engine-arg", "max_model_len=1024"]
        with mock.patch.dict("os.environ", protocol):
            up = RunningUp(tmp_path, *flags, engine="vllm")
        try:
            up.until("ready", lambda: bool(up.state()["ready"]), START_S)
            url = up.state()["url"]
            with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
                model = json.load(answer)["data"][0]["id"]
            body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Say hello."}]}
            headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert answer.status == 200

            def named(name: str) -> list[Received]:
                return [span for span in list(receiver.spans) if span.trace == TRACE and span.name == name]

            up.until("both have told of it", lambda: bool(named("llm_request") and named(f"chat {model}")), 60.0)
            (root,), (engine,) = named(f"chat {model}"), named("llm_request")
            assert engine.parent == root.id
        finally:
            up.stop()
