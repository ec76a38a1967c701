"""A running `headrace up`: whom its files, its sockets and its processes' arguments and environments let in."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.listening_sockets import LOOPBACK, descendants, listening
from tests.support.up_process import RunningUp

SECRET = "seecret-of-the-operator"
PROMPT = "my-pin-is-4711"


def prompted(model: str) -> dict[str, dict[str, Any]]:
    """A prompt in the body of each API, one of which is refused."""
    messages = [{"role": "user", "content": PROMPT}]
    return {
        "/v1/chat/completions": {"model": model, "messages": messages, "max_tokens": 2},
        "/v1/completions": {"model": model, "prompt": PROMPT, "max_tokens": 2, "user": PROMPT},
        "/v1/responses": {"model": model, "input": PROMPT, "max_output_tokens": 16},
        "/v1/messages": {"model": model, "messages": messages, "max_tokens": 2},
        "/tokenize": {"model": model, "prompt": PROMPT},
        "/v1/embeddings": {"model": model, "input": PROMPT},
    }


def started(folder: Path, part: str, *flags: str) -> subprocess.Popen[bytes]:
    """Start another part in the folder of a deployment, which logs into a file of its name."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with (folder / f"{part}.log").open("wb") as log:
        command = [sys.executable, "-P", "-m", "headrace", part, *flags]
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=log)


def ask_in_every_api(url: str) -> None:
    headers = {"authorization": f"Bearer {SECRET}", "content-type": "application/json"}
    for path, body in prompted("sim").items():
        asked = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
        if path == "/v1/embeddings":
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(asked, timeout=20)
        else:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                assert answer.status == 200


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nixl") is None, reason="KV blocks move over NIXL")
def test_parts_that_hand_blocks_over_listen_on_loopback_only(tmp_path: Path) -> None:
    """NATS and its monitoring, HTTP, probes and metrics, and what NIXL and UCX open to move blocks: each listening socket.

    Of `headrace planner` beside the deployment, too.
    """
    flags = ["--mode", "disagg", "--nats-login", "roles", "--frontends", "2", "--routers", "1"]
    up = RunningUp(tmp_path, *flags, "--metrics-port", "0", "--router-metrics-port", "0", "--console", "--console-port", "0")
    planner = None
    try:
        up.until_ready()
        assert up.chat()
        up.until("the console", lambda: b"<html" in urllib.request.urlopen(up.state()["console"]["url"], timeout=5).read())
        planner = started(tmp_path, "planner", "--planner-port", "0")
        up.until("the planner", lambda: "planner.listening" in (tmp_path / "planner.log").read_text())
        state, pids = up.state(), descendants({*up.pids(), planner.pid})
        parts = [*state["frontends"], *state["routers"], *state["workers"], state["console"], state["nats"]]
        assert len(parts) >= 7
        assert {part["pid"] for part in parts} <= pids, "each part is looked at"
        assert listening({planner.pid}) == LOOPBACK
        assert listening(pids) == LOOPBACK
    finally:
        if planner is not None:
            planner.kill()
            planner.wait()
        up.stop()


@pytest.mark.slow
def test_a_deployment_lets_in_its_user_and_its_keys_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / ".headrace").mkdir(mode=0o755)
        flags = ["--api-key", SECRET, "--metrics-port", "0", "--router-metrics-port", "0"]
        up = RunningUp(tmp_path, *flags)
    finally:
        os.umask(before)
    try:
        up.until_ready()
        url = up.state()["url"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/v1/models", timeout=10)
        asked = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {SECRET}"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.status == 200
        root = tmp_path / ".headrace"
        for path in (root, *root.rglob("*")):
            assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path
        pids = set(up.pids())
        for pid in pids:
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes(), pid
        for worker in up.state()["workers"]:
            assert SECRET.encode() not in Path(f"/proc/{worker['pid']}/environ").read_bytes()
        assert SECRET.encode() not in Path(f"/proc/{up.state()['nats']['pid']}/environ").read_bytes()
        ask_in_every_api(url)
        up.until("the log has the requests", lambda: all(path in up.log_file.read_text() for path in prompted("sim")))
        log = up.log_file.read_text()
        assert SECRET not in log
        assert PROMPT not in log
        assert listening(pids) == LOOPBACK
    finally:
        up.stop()
