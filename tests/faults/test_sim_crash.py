"""The simulator's injected crash is a real one."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Sequence
from headrace.workers.sim.engine import SimEngine

def sink(outputs):
    print(*(token for output in outputs for token in output.ids), flush=True)

async def main():
    engine = SimEngine()
    await engine.start(EngineConfig(model="sim", served_name="m", args={"faults": {"crash_at_token": 2}}), sink)
    await engine.submit(Sequence(id="a", token_ids=[1, 2, 3], prompt_tokens=3, sampling=Sampling(max_tokens=9)))
    await asyncio.sleep(30)

asyncio.run(main())
"""


@pytest.mark.fault
def test_the_process_is_gone_after_the_tokens_before_the_crash():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["28", "5454"]
