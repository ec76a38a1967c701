"""Data-parallel ranks of a real vLLM under a real router: a prompt goes to the rank whose cache has its beginning."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.engines.support.prefix_routing import ask, explained, must_follow_the_cache
from tests.engines.support.worker_process import ARGS, START_S, write_tiny_text
from tests.support.handovers import workers
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.long_engine, pytest.mark.timeout(600)]

RANKS = {"data_parallel_size": 2}


def started(folder: Path, model: Path, **args: Any) -> RunningUp:
    flags = [flag for name, value in (ARGS | args).items() for flag in ("--engine-arg", f"{name}={json.dumps(value)}")]
    named = ("--workers", "1", "--model", str(model), "--served-name", "small", "--metrics-port", "0")
    return RunningUp(folder, *named, *flags, engine="vllm")


def until_routed(up: RunningUp, count: int) -> None:
    up.until("ready", lambda: up.state()["ready"], START_S)
    up.until("all workers joined", lambda: len(workers(up)) == count, START_S)
    up.until("the router works", lambda: bool(up.events("router.ready")))


def metrics(up: RunningUp) -> str:
    (port,) = {event["port"] for event in up.events("metrics.listening") if event.get("worker") == "worker-1"}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text: str = page.read().decode()
    return text


def test_a_prompt_goes_to_the_rank_of_an_engine_that_has_its_beginning(tmp_path: Path, model_dir: Path) -> None:
    up = started(tmp_path, write_tiny_text(tmp_path / "model", model_dir), **RANKS)
    try:
        until_routed(up, 1)
        must_follow_the_cache(up)
        placed = ask(up, 99, turn=1)
        (worker,) = (member.worker for member in workers(up).values())
        assert set(placed.known) == {f"{worker}~0", f"{worker}~1"}
        assert placed.worker in placed.known
        assert f"placed on {placed.worker}" in explained(up, placed.id)
        page = metrics(up)
        for series in ("headrace_worker_engine_running", "headrace_worker_engine_blocks", "headrace_worker_kv_ok"):
            assert set(re.findall(rf'^{series}{{.*rank="(\d+)"', page, re.MULTILINE)) == {"0", "1"}, series
        assert set(re.findall(r'^vllm:prompt_tokens_total{.*engine="(\d+)"', page, re.MULTILINE)) == {"0", "1"}
    finally:
        up.stop()
