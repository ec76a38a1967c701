"""Two pools in one deployment: each answers under its own name with its own workers, and a pool is one engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from headrace.base.errors import EXIT_CONFIGURATION
from headrace.commands.control import live_workers
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from headrace.workers.sim.tokens import expected_text
from tests.faults.test_workers_come_and_go import holders
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.deployment, pytest.mark.fault]

PROMPT = list(range(200, 260))
SLOW = '{"mean_output_tokens": 0, "timing_overrides": {"decode_base_s": 0.01}}'
ROOT = Path(__file__).parents[3]
EXAMPLE = "examples.echo_engine:EchoEngine"


def models_of_workers(up: RunningUp) -> dict[str, str]:
    """Name of each live worker → its model."""

    async def ask() -> dict[str, str]:
        names = Subjects()
        options = up.connect_options()
        async with await Connection.connect(options, subjects=names) as connection:
            return {one.worker.rpartition("-")[0]: one.model for one in await live_workers(connection, names)}

    return asyncio.run(ask())


def join(up: RunningUp, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a worker beside the deployment."""
    command = [sys.executable, "-P", "-m", "headrace", "worker", "--nats", up.state()["nats"]["url"], *flags]
    environment = {**os.environ, **up.environment(), "PYTHONPATH": str(ROOT)}  # where the example engine is
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_each_pool_answers_by_itself_and_a_stream_that_loses_its_worker_stays_in_its_pool(tmp_path: Path) -> None:
    up = RunningUp(tmp_path, "--pool", f'other/sim={{"engine": "sim", "workers": 2, "engine_args": {SLOW}}}')
    try:
        up.until("ready", lambda: up.state()["ready"])
        expected = {"worker-1": "sim", "other-sim-worker-1": "other/sim", "other-sim-worker-2": "other/sim"}
        up.until("all workers have joined", lambda: models_of_workers(up) == expected)
        with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=30) as api:
            assert {model.id for model in api.models.list()} == {"sim", "other/sim"}
            first = api.completions.create(model="sim", prompt=PROMPT, max_tokens=20, temperature=0)
            assert first.choices[0].text == expected_text(PROMPT, 20)
            text, killed = "", None
            for chunk in api.completions.create(model="other/sim", prompt=PROMPT, max_tokens=300, temperature=0, stream=True):
                text += chunk.choices[0].text
                if killed is None and len(text) > 200:
                    (killed,) = [pid for pid, runs in holders(up).values() if runs]
                    os.kill(killed, signal.SIGKILL)
            assert killed is not None
            assert text == expected_text(PROMPT, 300)
        refused = join(up, "--engine", EXAMPLE, "--served-name", "sim")
        assert refused.returncode == EXIT_CONFIGURATION, refused.stderr
        assert "a pool is one engine" in refused.stderr
        up.process.terminate()
        assert up.process.wait(30) == 0, up.log()
    finally:
        up.stop()
