"""Prefill and decode on two machines: network, process and IPC namespaces of their own, and no variable exported.

The cable between them is a pair of virtual Ethernet devices.  Skipped where namespaces are not permitted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.jetstream.embedded_server import find_binary
from tests.support.nixl_peer import needs_nixl

pytestmark = [pytest.mark.deployment, needs_nixl, pytest.mark.timeout(180)]

START_S = 60.0
ADDRESSES = ("10.213.77.1", "10.213.77.2")
NATS = f"nats://{ADDRESSES[0]}:4222"
ASK = """
import json, sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() if body else None, {"Content-Type": "application/json"})
sys.stdout.write(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)


class Machine:
    """A set of namespaces with one address."""

    def __init__(self, name: str, address: str, folder: Path, stack: ExitStack) -> None:
        self.name, self.address = name, address
        self._folder, self._stack = folder, stack
        self._environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("HEADRACE_", "UCX_", "VLLM_", "NIXL_", "SGLANG_"))
        }

    def start(self, name: str, *words: str) -> Path:
        """Start a process here, which ends with the test. Returns its log."""
        path = self._folder / f"{name}.log"
        apart = ("unshare", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child")
        log = self._stack.enter_context(path.open("wb"))
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *apart, *words],
            cwd=self._folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.kill)
        return path

    def headrace(self, name: str, *words: str) -> Path:
        return self.start(name, sys.executable, "-P", "-m", "headrace", *words, "--log-format", "json")

    def ask(self, url: str, body: Any = None) -> Any:
        words = [sys.executable, "-c", ASK, url, json.dumps(body) if body is not None else ""]
        done = run("ip", "netns", "exec", self.name, *words)
        assert done.returncode == 0, done.stderr[-500:]
        return json.loads(done.stdout)

    def until_ready(self, url: str) -> None:
        deadline = time.monotonic() + START_S
        while run("ip", "netns", "exec", self.name, "curl", "-sf", url).returncode:
            assert time.monotonic() < deadline, url
            time.sleep(0.1)

    def sent(self) -> int:
        """The bytes that went into the cable here."""
        return int(run("ip", "netns", "exec", self.name, "cat", "/sys/class/net/hr0/statistics/tx_bytes").stdout)

    def metrics(self, port: int) -> dict[str, float]:
        done = run("ip", "netns", "exec", self.name, "curl", "-s", f"http://127.0.0.1:{port}/metrics")
        lines = (line.rsplit(" ", 1) for line in done.stdout.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}


def until(what: str, log: Path, word: str) -> None:
    deadline = time.monotonic() + START_S
    while word not in log.read_text():
        assert time.monotonic() < deadline, f"{what}:\n{log.read_text()[-3000:]}"
        time.sleep(0.05)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "curl"))):
        pytest.skip("network namespaces take root, iproute2, util-linux and curl")
    names = [f"hr{os.getpid()}{side}" for side in "ab"]
    with ExitStack() as stack:
        for name in names:
            if (made := run("ip", "netns", "add", name)).returncode:
                pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
            stack.callback(run, "ip", "netns", "del", name)
        cable = run("ip", "link", "add", "hr0", "netns", names[0], "type", "veth", "peer", "name", "hr0", "netns", names[1])
        if cable.returncode:
            pytest.skip(f"virtual Ethernet is not permitted here: {cable.stderr.strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            assert run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "hr0").returncode == 0
            for device in ("lo", "hr0"):
                assert run("ip", "-n", name, "link", "set", device, "up").returncode == 0
        one, other = (Machine(name, address, tmp_path, stack) for name, address in zip(names, ADDRESSES, strict=True))
        yield one, other


def test_blocks_go_from_one_machine_to_the_other(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    one, other = machines
    store = str(tmp_path / "store")
    until("nats-server", one.start("nats", str(find_binary()), "-js", "-a", ADDRESSES[0], "-sd", store), "is ready")
    model = ("--engine", "sim", "--model", "sim", "--engine-arg", "block_size=16", "--nats", NATS)
    decode = ("worker", "--role", "decode", "--name", "d", "--prefill", "always", "--metrics-port", "9100", *model)
    prefill = ("worker", "--role", "prefill", "--name", "p", *model)
    until("decode", one.headrace("decode", *decode), "worker.ready")
    until("prefill", other.headrace("prefill", *prefill), "worker.ready")
    until("frontend", one.headrace("frontend", "frontend", "--port", "8000", "--nats", NATS), "frontend.listening")
    one.until_ready("http://127.0.0.1:8000/ready")
    body = {"model": "sim", "prompt": list(range(5, 165)), "max_tokens": 4, "temperature": 0}
    before = other.sent()
    for n in range(3):
        body["prompt"] = [n + 5, *body["prompt"][1:]]
        answer = one.ask("http://127.0.0.1:8000/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 4
    shown = one.metrics(9100)
    remote = {name: value for name, value in shown.items() if name.startswith("headrace_worker_prefills_total{")}
    assert sum(value for name, value in remote.items() if 'where="remote"' in name) == 3, remote
    assert shown["headrace_worker_handover_tokens_total"] >= 3 * 144
    assert other.sent() - before >= 3 * 9 * 16384, "the blocks went over the cable"
    assert not {name: value for name, value in shown.items() if name.startswith("headrace_worker_prefill_failures_total{")}
