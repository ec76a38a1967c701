"""Two machines for tests: network, process and IPC namespaces of their own, joined by a pair of virtual Ethernet devices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

START_S = 60.0
ANSWER_S = 120.0
ADDRESSES = ("10.213.77.1", "10.213.77.2")
NATS = f"nats://{ADDRESSES[0]}:4222"  # runs on the first machine
ASK = """
import json, sys, urllib.request
url, body, timeout = sys.argv[1:]
request = urllib.request.Request(url, body.encode() if body else None, {"Content-Type": "application/json"})
sys.stdout.write(urllib.request.urlopen(request, timeout=float(timeout)).read().decode())
"""


def run(*words: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)


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
        words = [sys.executable, "-c", ASK, url, json.dumps(body) if body is not None else "", str(ANSWER_S)]
        done = run("ip", "netns", "exec", self.name, *words, timeout_s=ANSWER_S + 10.0)
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


def until(what: str, log: Path, word: str, timeout_s: float = START_S) -> None:
    """Wait for a word in a log. Fails with the end of the log."""
    deadline = time.monotonic() + timeout_s
    while word not in log.read_text():
        assert time.monotonic() < deadline, f"{what}:\n{log.read_text()[-3000:]}"
        time.sleep(0.05)


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Skips the test where namespaces are not permitted."""
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
        one, other = (Machine(name, address, folder, stack) for name, address in zip(names, ADDRESSES, strict=True))
        yield one, other
