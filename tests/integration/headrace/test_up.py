"""`headrace up` as a user runs it: ready, answering, healing, and gone without a trace."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from headrace.commands.control import live_workers
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.workers.sim.tokens import expected_text
from tests.support.up_process import START_S, RunningUp


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningUp]]:
    running: list[RunningUp] = []

    def start(*flags: str, endless: bool = True) -> RunningUp:
        running.append(RunningUp(tmp_path, *flags, endless=endless))
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


@pytest.mark.deployment
def test_up_serves_says_so_once_and_leaves_nothing_behind(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2")
    up.until_ready()
    assert up.chat()
    up.until("both workers run", lambda: all(worker["pid"] for worker in up.state()["workers"]))
    state = up.state()
    assert "headrace frontend" in _command_line(state["frontend"]["pid"])
    assert ["headrace worker" in _command_line(worker["pid"]) for worker in state["workers"]] == [True, True]
    pids = up.pids()
    shutil.rmtree(up.run_file.parent)
    up.until("its run file is there again", lambda: up.pids() == pids)
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(30) == 0, up.log()
    assert _no_longer(pids)
    assert not up.run_file.exists()
    said = up.out_file.read_text()
    assert said.count("Headrace is ready") == 1
    assert f"curl {state['url']}/v1/chat/completions" in said
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", state["frontend"]["port"]), timeout=1):
        pass


@pytest.mark.deployment
def test_an_answer_of_the_simulator_ends_by_itself_and_the_same_way_again(start: Callable[..., RunningUp]) -> None:
    up = start(endless=False)
    up.until_ready()
    client = openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none")
    choices = [
        client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "Say hello."}]).choices[0]
        for _ in range(2)
    ]
    assert [choice.finish_reason for choice in choices] == ["stop", "stop"]
    assert choices[0].message.content == choices[1].message.content
    long = client.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "Say hello."}], max_tokens=3000, extra_body={"ignore_eos": True}
    )
    assert long.usage is not None
    assert long.usage.completion_tokens == 3000


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
    assert not up.events("part.crashed")


@pytest.mark.fault
def test_a_drained_worker_is_not_started_again(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2")
    up.until_ready()
    environment = {**os.environ, **up.environment()}
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
    (left,) = up.events("part.left")
    os.kill(up.state()["workers"][0]["pid"], signal.SIGHUP)  # as SIGTERM
    up.until("worker-1 has left", lambda: [e["reason"] for e in up.events("part.left") if e != left] == ["drained"])


@pytest.mark.deployment
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


# -- prefill and decode apart --------------------------------------------------------------------------------------------------


def _headrace(up: RunningUp, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **up.environment()}
    command = [sys.executable, "-P", "-m", "headrace", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _roles(up: RunningUp) -> dict[str, str]:
    """Name → role of the workers that are ready."""

    async def ask() -> dict[str, str]:
        names = Subjects()
        options = up.connect_options()
        async with await Connection.connect(options, subjects=names) as connection:
            live = await live_workers(connection, names)
        return {member.worker.rpartition("-")[0]: member.role for member in live if not member.draining}

    return asyncio.run(ask())


def _until_joined(up: RunningUp, roles: dict[str, str]) -> None:
    def joined() -> bool:
        try:
            return _roles(up) == roles
        except JetStreamError:  # the buckets are made by the first part that comes
            return False

    up.until(f"joined: {roles}", joined)


def _metric(up: RunningUp, worker: str, pattern: str) -> float:
    """The sum of a worker's samples whose name and labels match."""
    (port,) = {event["port"] for event in up.events("metrics.listening") if event.get("worker") == worker}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(pattern, line))


@pytest.mark.deployment
def test_disagg_has_prompts_computed_by_the_prefill_worker(start: Callable[..., RunningUp]) -> None:
    up = start("--mode", "disagg", "--prefill", "always", "--metrics-port", "0")
    up.until_ready()
    up.until("the router works", lambda: bool(up.events("router.ready")))
    _until_joined(up, {"decode-1": "decode", "prefill-1": "prefill"})
    assert [(worker["name"], worker["role"]) for worker in up.state()["workers"]] == [
        ("decode-1", "decode"),
        ("prefill-1", "prefill"),
    ]

    def remote() -> float:
        return _metric(up, "decode-1", r'headrace_worker_prefills_total\{.*where="remote"')

    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=30) as client:
        asked = 0

        def computed_remotely() -> bool:
            nonlocal asked
            asked += 1
            client.completions.create(model="sim", prompt=[100 + asked] * 300, max_tokens=2)
            return remote() > 0

        up.until("a prompt is computed remotely", computed_remotely)
        before = remote()
        prompt = list(range(3000, 3400))
        answer = client.completions.create(
            model="sim", prompt=prompt, max_tokens=50, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].text == expected_text(prompt, 50)
        chat = client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "Tell me of the river. " * 60}], max_tokens=8
        )
        assert chat.choices[0].message.content
    assert remote() == before + 2
    assert _metric(up, "decode-1", r"headrace_worker_prefill_failures_total\{") == 0
    assert _metric(up, "decode-1", r"headrace_worker_handover_tokens_total ") >= 384
    said = _headrace(up, "router", "explain", chat.id)
    assert said.returncode == 0, said.stderr
    assert "prompt computed by" in said.stdout
    assert "prefill worker, reason always" in said.stdout or "by prefill-1-" in said.stdout
    pids = up.pids()
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(30) == 0, up.log()
    assert _no_longer(pids)


@pytest.mark.deployment
def test_prefill_workers_alone_are_not_ready_until_one_becomes_a_decode_worker(start: Callable[..., RunningUp]) -> None:
    up = start("--mode", "disagg", "--decode-workers", "0", "--prefill-workers", "2")
    _until_joined(up, {"prefill-1": "prefill", "prefill-2": "prefill"})
    assert up.state()["ready"] is False
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{up.state()['url']}/ready", timeout=10)
    refused.value.close()
    assert refused.value.code == 503
    changed = _headrace(up, "worker", "role", "prefill-2", "decode", "--grace", "5")
    assert changed.returncode == 0, changed.stderr
    assert _roles(up) == {"prefill-1": "prefill", "prefill-2": "decode"}
    up.until_ready()
    assert up.chat()


@pytest.mark.deployment
def test_an_engine_that_was_started_aggregated_refuses_another_role(start: Callable[..., RunningUp]) -> None:
    up = start()
    up.until_ready()
    refused = _headrace(up, "worker", "role", "worker-1", "prefill")
    assert refused.returncode == 1
    assert "refused" in refused.stderr
    assert _roles(up) == {"worker-1": "aggregated"}
    assert up.chat()


def test_workers_of_a_role_without_the_mode_end_up_before_anything_starts(start: Callable[..., RunningUp]) -> None:
    up = start("--prefill-workers", "2")
    assert up.process.wait(START_S) == 78
    assert "up.prefill_workers = 2 (--prefill-workers): only with --mode disagg" in up.log_file.read_text()
    assert "server.started" not in up.log_file.read_text()
