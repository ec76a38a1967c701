"""A `headrace up` run as a user runs it: a process with a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.jetstream.context import ConnectOptions

START_S = 90.0
STOP_S = 60.0


class RunningUp:
    """A `headrace up` in a folder of its own."""

    def __init__(self, folder: Path, *flags: str, engine: str = "sim", endless: bool = True) -> None:
        """`endless`: answers of the simulator run to `max_tokens`, so that tests know their length."""
        if endless and engine == "sim":
            flags = ("--engine-arg", "mean_output_tokens=0", *flags)
        self.run_file = folder / ".headrace" / "run" / "up.json"
        self.log_file = folder / "log"
        with self.log_file.open("wb") as log, (folder / "out").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace", "up", "--no-console", "--engine", engine, "--port", "0", *flags],
                cwd=folder,
                stdout=out,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
                start_new_session=True,
            )
        self.out_file = folder / "out"

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.run_file.read_text())
        return state

    def connect_options(self) -> ConnectOptions:
        """How an operator of the deployment reaches its NATS server."""
        nats = self.state()["nats"]
        return ConnectOptions.from_context(nats["context"]) if nats["context"] else ConnectOptions(servers=(nats["url"],))

    def environment(self) -> dict[str, str]:
        """The variable with which a command finds the deployment from another folder."""
        return {"HEADRACE_DATA_DIR": str(self.run_file.parents[1])}

    def until(self, what: str, met: Callable[[], bool], timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if met():
                    return
            except (OSError, ValueError, LookupError):
                pass
            assert self.process.poll() is None, f"up ended with {self.process.returncode} before {what}:\n{self.log()}"
            assert time.monotonic() < deadline, f"not in time: {what}:\n{self.log()}"
            time.sleep(0.02)

    def until_ready(self) -> None:
        self.until("ready", lambda: self.state()["ready"])

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")[-6000:]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for line in self.log_file.read_text().splitlines() if (event := json.loads(line))["event"] == name]

    def chat(self) -> str:
        state = self.state()
        with urllib.request.urlopen(f"{state['url']}/v1/models", timeout=5) as answer:
            model = json.load(answer)["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{state['url']}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            content: str = json.load(answer)["choices"][0]["message"]["content"]
            return content

    def answers(self) -> bool:
        try:
            return bool(self.chat())
        except urllib.error.URLError:
            return False

    def pids(self) -> list[int]:
        state = self.state()
        parts = [state["nats"], *state["frontends"], *state["workers"], *state["routers"]]
        return [self.process.pid, *(part["pid"] for part in parts if part["pid"])]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextmanager
def routed_up(folder: Path, *flags: str) -> Iterator[RunningUp]:
    """A deployment that is ready and whose router works; killed afterwards."""
    running = RunningUp(folder, *flags)
    try:
        running.until_ready()
        running.until("the router works", lambda: bool(running.events("router.ready")))
        yield running
    finally:
        running.stop()


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[RunningUp]:
    """A deployment that is ready, logs JSON, and ends without an error when it is interrupted."""
    up = RunningUp(folder, *flags, "--log-format", "json")
    try:
        up.until_ready()
        yield up
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(STOP_S) == 0
    finally:
        up.stop()
