"""`headrace up` as a user runs it: ready, answering, healing, and gone without a trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.running_up import START_S, RunningUp


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
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", state["frontend"]["port"]), timeout=1):
        pass


@pytest.mark.fault
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


@pytest.mark.fault
def test_nothing_outlives_a_killed_up(start: Callable[..., RunningUp]) -> None:
    up = start()
    up.until_ready()
    pids = up.pids()
    up.process.kill()
    up.process.wait()
    assert _no_longer(pids)


@pytest.mark.fault
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


@pytest.mark.fault
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


@pytest.mark.fault
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
