"""Engines that die or fall silent, requests that kill their workers, and a broker that is killed, under a real client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.workers.sim.tokens import expected_text
from tests.faults.test_workers_come_and_go import SLOW
from tests.support.sim_streams import client_of
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.fault

PROMPT = list(range(300, 340))


def stream_text(api: openai.OpenAI, tokens: int, then: Callable[[str], None] = lambda _text: None, **extra: Any) -> str:
    text = ""
    body = {"ignore_eos": True, **extra}
    for chunk in api.completions.create(
        model="sim", prompt=PROMPT, max_tokens=tokens, temperature=0, stream=True, extra_body=body
    ):
        text += "".join(choice.text for choice in chunk.choices)
        then(text)
    return text


def another_worker(up: RunningUp, folder: Path, name: str, *flags: str) -> subprocess.Popen[bytes]:
    """A worker of its own beside `up`'s, so that its end can be watched."""
    command = [sys.executable, "-P", "-m", "headrace", "worker", "--engine", "sim", "--name", name]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen([*command, "--nats", up.state()["nats"]["url"], *flags], cwd=folder, stderr=log)


@pytest.mark.parametrize(
    ("fault", "flags"),
    [('{"die_at_step": 60}', ()), ('{"stuck_at_token": 50, "fresh_only": true}', ("--stall", "1"))],
    ids=["dead", "silent"],
)
def test_an_engine_that_dies_or_falls_silent_ends_its_worker_and_the_stream_goes_on(
    tmp_path: Path, fault: str, flags: tuple[str, ...]
) -> None:
    up = RunningUp(tmp_path, "--workers", "0")
    try:
        up.until("the frontend runs", lambda: bool(up.state()["frontend"]["pid"]))
        ill = another_worker(up, tmp_path, "ill", *SLOW, "--engine-arg", f"faults={fault}", *flags)
        up.until_ready()
        heir: list[subprocess.Popen[bytes]] = []

        def join(text: str) -> None:
            if text and not heir:
                heir.append(another_worker(up, tmp_path, "heir", *SLOW))

        with client_of(up) as api:
            assert stream_text(api, 120, join) == expected_text(PROMPT, 120)
        assert ill.wait(30) == 70
        assert "engine.died" in (tmp_path / "ill.log").read_text()
        heir[0].terminate()
        assert heir[0].wait(30) == 0
    finally:
        up.stop()


def test_streams_go_on_and_nothing_accepted_is_lost_when_the_broker_is_killed(start: Callable[..., RunningUp]) -> None:
    up = start(*SLOW)
    worker = up.state()["workers"][0]["pid"]
    killed = threading.Event()

    def kill(text: str) -> None:
        if len(text) > 150 and not killed.is_set():
            killed.set()
            os.kill(up.state()["nats"]["pid"], signal.SIGKILL)

    with client_of(up) as api:
        assert stream_text(api, 300, kill) == expected_text(PROMPT, 300)
    assert killed.is_set()
    assert up.state()["workers"][0]["pid"] == worker, "the engine was not restarted"
    deadline = time.monotonic() + 20
    while not up.answers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
