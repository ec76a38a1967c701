"""vLLM's own HTTP server, without Headrace, as the measure of what a request should be answered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headrace.up.parts import choose_port
from tests.engines.conftest import FEWER_PROCESSES

START_S = 240.0
STOP_S = 20.0


class OwnServer:
    """Running at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")


@contextmanager
def own_server(folder: Path, model: str, *flags: str) -> Iterator[OwnServer]:
    """`model` is a folder; its log goes to `folder`."""
    port = choose_port("127.0.0.1", 0)  # it listens seconds later: no outgoing connection should have taken it meanwhile
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    environ = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **FEWER_PROCESSES,
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log_file = folder / "own_server.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--model", model, "--enforce-eager", *flags], stdout=log, stderr=log, env=environ, start_new_session=True
        )
    server = OwnServer(f"http://127.0.0.1:{port}")
    try:
        _wait(server, process, log_file)
        yield server
    finally:
        with suppress(ProcessLookupError):  # it ended by itself, and the test has failed for that
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of it
        process.wait(STOP_S)


def _wait(server: OwnServer, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2):
                return
        except OSError:
            pass
        assert process.poll() is None, log_file.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, log_file.read_text(errors="replace")[-3000:]
        time.sleep(0.2)
