"""`headrace up` as a user runs it: ready, answering, healing, and gone without a trace."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

START_S = 30.0


class RunningUp:
    """A `headrace up --engine sim` in a folder of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.run_file = folder / ".headrace" / "run" / "up.json"
        self.log_file = folder / "log"
        with self.log_file.open("wb") as log, (folder / "out").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace", "up", "--engine", "sim", "--port", "0", *flags],
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

    def until(self, what: str, met: Callable[[], bool], timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if met():
                    return
            except (OSError, ValueError):
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
        parts = [state["nats"], state["frontend"], *state["workers"]]
        return [self.process.pid, *(part["pid"] for part in parts if part["pid"])]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningUp]]:
    running: list[RunningUp] = []

    def start(*flags: str) -> RunningUp:
        running.append(RunningUp(tmp_path, *flags))
        return running[-1]

    yield start
    for up in running:
        up.stop()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _no_longer(pids: list[int]) -> bool:
    deadline = time.monotonic() + 5
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(_alive, pids))


def test_up_serves_says_so_once_and_leaves_nothing_behind(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2")
    up.until_ready()
    assert up.chat()
    up.until("both workers run", lambda: all(worker["pid"] for worker in up.state()["workers"]))
    state = up.state()
    assert "headrace frontend" in _command_line(state["frontend"]["pid"])
    assert ["headrace worker" in _command_line(worker["pid"]) for worker in state["workers"]] == [True, True]
    pids = up.pids()
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(30) == 0, up.log()
    assert _no_longer(pids)
    assert not up.run_file.exists()
    said = up.out_file.read_text()
    assert said.count("Headrace is ready") == 1
    assert f"curl {state['url']}/v1/chat/completions" in said
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", state["frontend"]["port"]), timeout=1):
        pass


def test_a_killed_worker_frontend_and_server_are_restarted(start: Callable[..., RunningUp]) -> None:
    up = start()
    up.until_ready()
    before = up.state()
    os.kill(before["workers"][0]["pid"], signal.SIGKILL)
    os.kill(before["frontend"]["pid"], signal.SIGKILL)
    os.kill(before["nats"]["pid"], signal.SIGKILL)

    def replaced() -> bool:
        now = up.state()
        pids = [now["workers"][0]["pid"], now["frontend"]["pid"], now["nats"]["pid"]]
        old = [before["workers"][0]["pid"], before["frontend"]["pid"], before["nats"]["pid"]]
        return all(new and new != former for new, former in zip(pids, old, strict=True))

    up.until("all restarted", replaced)
    up.until("answers again", up.answers)
    assert {event["part"] for event in up.events("part.crashed")} == {"worker-1", "frontend", "nats"}
    assert up.state()["url"] == before["url"]
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(30) == 0, up.log()


def test_nothing_outlives_a_killed_up(start: Callable[..., RunningUp]) -> None:
    up = start()
    up.until_ready()
    pids = up.pids()
    up.process.kill()
    up.process.wait()
    assert _no_longer(pids)


def test_a_second_signal_kills_at_once(start: Callable[..., RunningUp]) -> None:
    up = start("--grace", "600")
    up.until_ready()
    pids = up.pids()
    os.kill(up.state()["workers"][0]["pid"], signal.SIGSTOP)  # it will not drain
    up.process.send_signal(signal.SIGINT)
    up.until("stopping", lambda: bool(up.events("up.stopping")))
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(15) == 0, up.log()
    assert _no_longer(pids)


def test_a_drained_worker_is_not_started_again(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2")
    up.until_ready()
    environment = {**os.environ, "HEADRACE_NATS_URL": up.state()["nats"]["url"]}
    drain = [sys.executable, "-P", "-m", "headrace", "worker", "drain"]

    def drained() -> bool:
        return (
            subprocess.run([*drain, "worker-2"], env=environment, capture_output=True, timeout=30, check=False).returncode == 0
        )

    up.until("worker-2 joined and drains", drained)
    up.until(
        "worker-2 has left", lambda: [e["reason"] for e in up.events("part.left") if e["part"] == "worker-2"] == ["drained"]
    )
    assert up.chat()
    unknown = subprocess.run([*drain, "nobody"], env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert unknown.returncode == 1
    assert "worker-1-" in unknown.stderr


def test_wrong_settings_of_a_worker_end_up_with_its_message(start: Callable[..., RunningUp]) -> None:
    up = start("--engine-arg", "no_such_setting=1")
    assert up.process.wait(START_S) == 78, up.log()
    assert "no_such_setting" in up.log_file.read_text().splitlines()[-1]


def test_parts_started_one_by_one_find_each_other_through_one_server(start: Callable[..., RunningUp], tmp_path: Path) -> None:
    up = start("--workers", "0")
    up.until("the frontend runs", lambda: bool(up.state()["frontend"]["pid"]))
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace", "worker", "--engine", "sim", "--nats", up.state()["nats"]["url"]],
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    try:
        up.until_ready()
        assert up.chat()
    finally:
        worker.terminate()
        assert worker.wait(20) == 0
