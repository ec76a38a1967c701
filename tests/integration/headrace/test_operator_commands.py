"""Operators' commands beside a `headrace up`, as they are typed: in its folder, without an address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.up_process import RunningUp, routed_up

pytestmark = pytest.mark.deployment

TIMEOUT_S = 30


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    flags = ("--prefix", "mine")
    with routed_up(tmp_path_factory.mktemp("up"), *flags) as running:
        yield running


def headrace(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-P", "-m", "headrace", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("worker status", "worker-1-"),
        ("worker health worker-1", "canary_s"),
        ("worker log-level worker-1 debug", "logs from level debug on"),
        ("router status", "router-1-"),
        ("streams status", "MINE_REQ"),
        ("dlq ls", "no dead letters"),
        ("model ls", "sim"),
        ("replay index --model sim", "worker-1-"),
        ("doctor", "every consumer of placed work has a live worker"),
    ],
)
def test_a_command_without_an_address_reaches_what_runs_here(up: RunningUp, command: str, says: str) -> None:
    done = headrace(up.run_file.parents[2], *command.split())
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_a_placement_is_explained_without_an_address(up: RunningUp) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{up.state()['url']}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        told = json.load(answer)["id"]
    done = headrace(up.run_file.parents[2], "router", "explain", told)
    assert done.returncode == 0, done.stderr
    assert "worker-1-" in done.stdout


def test_the_data_folder_can_be_named_from_anywhere(up: RunningUp, tmp_path: Path) -> None:
    done = headrace(tmp_path, "worker", "status", "--data-dir", str(up.run_file.parents[1]))
    assert "worker-1-" in done.stdout


def test_every_worker_and_router_answers_an_orchestrator_on_a_port_of_the_run_file(up: RunningUp) -> None:
    state = up.state()
    for part in (*state["workers"], *state["routers"]):
        base = f"http://127.0.0.1:{part['metrics_port']}"
        for path in ("/live", "/ready", "/health"):
            with urllib.request.urlopen(f"{base}{path}", timeout=10) as answer:
                told = json.load(answer)
            assert told["status"] in ("alive", "ready", "healthy")
        assert told["component"] in part["name"]
        with urllib.request.urlopen(f"{base}/metrics", timeout=10) as answer:
            assert b"headrace_" in answer.read()
    assert state["url"].endswith(f":{state['frontend']['port']}")


def test_the_doctor_finds_nothing_to_mend_beside_what_runs_and_says_where_nothing_does(up: RunningUp, tmp_path: Path) -> None:
    done = headrace(up.run_file.parents[2], "doctor", "--json")
    levels = {finding["check"]: finding["level"] for finding in json.loads(done.stdout)}
    assert (done.returncode, [check for check, level in levels.items() if level == "error"]) == (0, [])
    assert {levels[check] for check in ("deployment.streams", "deployment.workers", "deployment.routers")} == {"ok"}
    assert levels["server.sync"] != "unknown"
    away = headrace(tmp_path, "doctor", "--nats", "nats://127.0.0.1:9")
    assert away.returncode == 69
    assert "no NATS server answers at nats://127.0.0.1:9" in away.stdout
