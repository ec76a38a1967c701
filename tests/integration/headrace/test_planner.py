"""`headrace planner` beside a `headrace up` with the simulator: workers come with the load and leave after it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.messages.members import WorkerMember
from headrace.commands.control import live_workers
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(240)]

WORDS = [f"word{i}" for i in range(40)]
FAST = {"HEADRACE_PLANNER_STEP_S": "2", "HEADRACE_PLANNER_DOWN_S": "4", "HEADRACE_PLANNER_IDLE_S": "5"}
PATIENCE_S = 90.0
REQUESTS = 40


class RunningPlanner:
    """A `headrace planner` in the folder of an `up`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.log_file = folder / f"planner-{time.monotonic_ns()}.log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "headrace",
                    "planner",
                    "--planner-port",
                    "0",
                    "--tick",
                    "0.5",
                    "--itl",
                    "1",
                    *flags,
                ],
                cwd=folder,
                env={**{name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}, **FAST},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for line in self.log_file.read_text().splitlines() if (event := json.loads(line))["event"] == name]

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.events("planner.decided")]

    def until(self, what: str, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not met():
            assert self.process.poll() is None, self.log_file.read_text()[-4000:]
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.log_file.read_text()[-6000:]}"
            time.sleep(0.1)

    def desired(self) -> dict[str, Any]:
        port = self.events("planner.listening")[0]["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/desired", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)["pools"][0]
            return found

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def ask(url: str, seed: int) -> int:
    rng = random.Random(seed)
    body = {"model": "sim", "prompt": " ".join(rng.choices(WORDS, k=250)), "max_tokens": 16}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
        return int(answer.status)


def workers(up: RunningUp) -> int:
    return sum(part["pid"] is not None for part in up.state()["workers"])


def members(up: RunningUp) -> dict[str, WorkerMember]:
    async def ask() -> dict[str, WorkerMember]:
        names = Subjects()
        async with await Connection.connect(up.connect_options(), subjects=names) as connection:
            return {one.worker.rpartition("-")[0]: one for one in await live_workers(connection, names)}

    return asyncio.run(ask())


def acted(planner: RunningPlanner) -> list[tuple[str, str]]:
    return [(event["kind"], event["role"]) for event in planner.events("planner.acted")]


def started(planner: RunningPlanner) -> int:
    return sum(event["kind"] == "start" for event in planner.events("planner.acted"))


def test_workers_come_with_the_load_and_leave_after_it_without_a_failed_request(tmp_path: Path) -> None:
    flags = ("--engine-arg", "timing=cpu-small", "--no-worker-wait", "60", "--nats-login", "roles")
    up = RunningUp(tmp_path, *flags, endless=False)
    planners: list[RunningPlanner] = []
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"aggregated": {"base_s": 0.021, "prefill_s": 0.00116, "decode_s": 0.0007}}))

    def planner(*flags: str) -> RunningPlanner:
        planners.append(RunningPlanner(tmp_path, "--mode", "act", "--most", "3", "--profile", str(profile), *flags))
        return planners[-1]

    try:
        up.until_ready()
        first = planner("--least", "1")
        first.until("it leads", lambda: bool(first.events("planner.leads")))
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(ask, up.state()["url"], seed) for seed in range(REQUESTS)]
            first.until("a worker was added", lambda: workers(up) > 1)
            first.process.send_signal(signal.SIGKILL)  # its memory is what it had stored
            second = planner("--least", "0")
            assert [answer.result() for answer in answers] == [200] * REQUESTS
        second.until("it has recalled what the first one knew", lambda: bool(second.events("planner.recalled")))
        second.until("all have left", lambda: workers(up) == 0)
        assert "idle" in second.reasons()
        starts = started(second)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, up.state()["url"], 1)  # from zero
            second.until("a worker is started", lambda: started(second) > starts)
            second.stop()  # the request waits in the queue: the worker is all that it needs now
            assert waiting.result() == 200
        assert workers(up) >= 1
        assert not up.events("part.crashed")
        assert any("planner.json" in str(event) for event in second.events("settings.loaded")), "it has a login of its own"
        assert "Violation" not in (tmp_path / ".headrace" / "nats" / "nats-server.log").read_text()
    finally:
        for one in planners:
            one.stop()
        up.stop()


def test_a_planner_that_only_advises_starts_and_drains_nothing(tmp_path: Path) -> None:
    up = RunningUp(tmp_path, "--workers", "2", endless=False)
    planner = None
    try:
        up.until_ready()
        planner = RunningPlanner(tmp_path, "--least", "3")
        planner.until("it wants a third worker", lambda: "below_minimum" in planner.reasons())
        planner.until("its page says so", lambda: planner.desired()["desired"] == {"aggregated": 3})
        assert planner.desired()["supply"] == {"aggregated": 2}
        assert workers(up) == 2
        assert not planner.events("planner.acted")
        assert any("deployment.json" in str(event) for event in planner.events("settings.loaded")), (
            "the login of the deployment"
        )
    finally:
        if planner is not None:
            planner.stop()
        up.stop()


def test_a_worker_of_the_role_that_has_too_many_really_takes_the_role_that_has_too_few(tmp_path: Path) -> None:
    up = RunningUp(tmp_path, "--mode", "disagg", "--prefill-workers", "1", "--decode-workers", "3", endless=False)
    profile = tmp_path / "profile.json"
    speed = {"base_s": 0.001, "prefill_s": 1e-5, "decode_s": 1e-4}
    profile.write_text(json.dumps({"prefill": speed, "decode": speed}))
    planner = None
    try:
        up.until_ready()
        up.until("all have joined", lambda: len(members(up)) == 4)
        assert ask(up.state()["url"], 1) == 200
        pids = {part["pid"] for part in up.state()["workers"]}
        planner = RunningPlanner(tmp_path, "--mode", "act", "--least", "2", "--most", "4", "--profile", str(profile))

        def roles() -> list[str]:
            assert ask(up.state()["url"], 2) == 200, "before, while and after it changes"
            return sorted(one.role for one in members(up).values())

        planner.until("two have each role", lambda: roles() == ["decode", "decode", "prefill", "prefill"])
        planner.until("it has the worker's answer", lambda: bool(acted(planner)))
        assert acted(planner) == [("role", "prefill")]
        assert "role_shift" in planner.reasons()
        assert {part["pid"] for part in up.state()["workers"]} == pids, "none was started for it"
    finally:
        if planner is not None:
            planner.stop()
        up.stop()


def test_a_worker_that_sleeps_is_woken_before_another_one_is_started(tmp_path: Path) -> None:
    up = RunningUp(tmp_path, "--workers", "2", endless=False)
    planner = None
    try:
        up.until_ready()
        up.until("both have joined", lambda: len(members(up)) == 2)
        command = [sys.executable, "-P", "-m", "headrace", "worker", "sleep", "worker-2"]
        environment = {**os.environ, **up.environment()}
        told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode == 0, told.stderr
        assert members(up)["worker-2"].sleeping
        planner = RunningPlanner(tmp_path, "--mode", "act", "--least", "2", "--most", "3")
        planner.until("it serves again", lambda: not members(up)["worker-2"].draining)
        planner.until("it has the worker's answer", lambda: bool(acted(planner)))
        assert acted(planner) == [("wake", "aggregated")]
        assert workers(up) == 2
    finally:
        if planner is not None:
            planner.stop()
        up.stop()
