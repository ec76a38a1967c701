"""One vLLM over two nodes, which are two workers of this machine: the first serves, the second computes its half.

vLLM's CPU build splits the layers' weights over nodes (tensor parallel); with whole layers per node (pipeline parallel) its
core ends at the first prompt.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.jetstream.embedded_server import EmbeddedServer
from tests.engines.support.worker_process import WorkerProcess, free_port, write_tiny_text

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long_engine,
    pytest.mark.fault,
    pytest.mark.timeout(500),
]


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[str]:
    with EmbeddedServer(tmp_path / "nats") as server:
        yield server.url


def complete(url: str) -> str:
    body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def frontend(stack: ExitStack, folder: Path, nats: str) -> str:
    port = free_port()
    command = [sys.executable, "-P", "-m", "headrace", "frontend", "--nats", nats, "--port", str(port)]
    with (folder / "frontend.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return f"http://127.0.0.1:{port}"


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except OSError:
        return False


def test_the_first_node_serves_and_the_second_ends_with_it(tmp_path: Path, model_dir: Path, nats: str) -> None:
    model = write_tiny_text(tmp_path / "model", model_dir)
    with ExitStack() as stack:
        url = frontend(stack, tmp_path, nats)
        with WorkerProcess("alone", tmp_path, nats, model) as alone:
            alone.until("one node alone serves", lambda: ready(url))
            expected = complete(url)
        shape: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
        follower = stack.enter_context(WorkerProcess("second", tmp_path, nats, model, **shape, node_rank=1))
        leader = stack.enter_context(WorkerProcess("first", tmp_path, nats, model, **shape, node_rank=0))
        leader.until("the engine has started", lambda: bool(leader.events("engine.started")))
        assert leader.events("engine.started")[0]["parallel"] == {"tensor": 2}
        follower.until("the other node follows", lambda: bool(follower.events("worker.follows")), 30.0)
        leader.until("both serve as one", lambda: ready(url), 60.0)
        assert complete(url) == expected
        assert not follower.events("worker.ready")
        os.kill(leader.process.pid, signal.SIGKILL)
        assert follower.process.wait(60) != 0, "it is to be started again, for the next first node"
        assert "first node" in follower.log_file.read_text(errors="replace")
