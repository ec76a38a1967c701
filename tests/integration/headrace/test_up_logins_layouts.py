"""A `headrace up` with logins in other layouts: without a router, and with prefill and decode apart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.up_logins import headrace, violations
from tests.support.up_process import RunningUp, routed_up

pytestmark = pytest.mark.deployment

TIMEOUT_S = 60.0
MODEL = "sim"


def busiest_worker(up: RunningUp) -> int:
    """Return the process id of the worker that holds the most requests: without a router one may have taken all."""
    told = json.loads(headrace(up, "worker", "status", "--json"))
    return int(max(told, key=lambda one: sum((one["state"] or {}).get("states", {}).values()))["pid"])


def test_work_of_a_dead_worker_is_taken_over_without_a_router(tmp_path: Path) -> None:
    """The other worker reads and deletes it through the steward, and removes the consumer whose name it does not know."""
    slow = ("--engine-arg", 'timing_overrides={"decode_base_s": 0.01}')
    flags = ("--nats-login", "roles", "--workers", "2", "--routers", "0", "--log-format", "json", *slow)
    running = RunningUp(tmp_path, *flags)
    try:
        running.until_ready()
        running.until("both workers", lambda: len(headrace(running, "worker", "status").splitlines()) == 3)
        with OpenAI(base_url=f"{running.state()['url']}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            streams = [
                client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": f"{n}"}], max_tokens=1200, stream=True
                )
                for n in range(6)
            ]
            for stream in streams:
                next(iter(stream))
            os.kill(busiest_worker(running), signal.SIGKILL)
            for stream in streams:
                assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in stream) > 1000
        assert running.events("job.moved")
        assert not violations(running)
    finally:
        running.stop()


@pytest.mark.skipif(find_spec("nixl") is None, reason="KV blocks move over NIXL")
def test_prefill_and_decode_apart_work_with_logins(tmp_path: Path) -> None:
    with routed_up(tmp_path, "--nats-login", "roles", "--mode", "disagg") as running:
        assert asyncio.run(asyncio.to_thread(running.chat))
        running.until("an answer", running.answers)
        assert not violations(running)
