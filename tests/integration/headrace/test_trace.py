"""`headrace trace` beside a `headrace up`: a request that moved, in words and as JSON, and one from before a restart."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from headrace.workers.sim.tokens import expected_text
from tests.faults.test_workers_come_and_go import holders
from tests.integration.headrace.test_operator_commands import headrace
from tests.support.up_process import RunningUp, routed_up

pytestmark = [pytest.mark.deployment, pytest.mark.fault]

PROMPT = list(range(300, 360))
SLOW = '{"decode_base_s": 0.01}'


def ask(up: RunningUp, name: str, *, kill: bool) -> str:
    """Stream 200 tokens under the client's id `name`, and kill the worker in the middle. Returns the answer's id."""
    body = {"model": "sim", "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}
    text, answer_id, killed = "", "", not kill
    headers = {"x-request-id": name}
    with httpx.stream("POST", f"{up.state()['url']}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            answer_id = event["id"]
            text += "".join(choice["text"] for choice in event["choices"])
            if not killed and len(text) > 200:
                (pid,) = [pid for pid, runs in holders(up).values() if runs]
                os.kill(pid, signal.SIGKILL)
                killed = True
    assert text == expected_text(PROMPT, 200)
    return answer_id


def test_the_story_of_a_request_that_moved_and_of_one_that_no_frontend_remembers(tmp_path: Path) -> None:
    flags = ("--workers", "2", "--engine-arg", f"timing_overrides={SLOW}")
    with routed_up(tmp_path, *flags) as up:
        folder = up.run_file.parents[2]
        answer_id = ask(up, "my-request", kill=True)
        for name in (answer_id, "my-request"):
            told = headrace(folder, "trace", name)
            assert told.returncode == 0, told.stderr
            assert "answered (length)" in told.stdout
            assert ", attempt 2" in told.stdout
            assert "the client's id is my-request" in told.stdout
            assert "! move" in told.stdout
            assert "policy" in told.stdout, "the router's reasons"
        found = json.loads(headrace(folder, "trace", "my-request", "--json").stdout)
        (story,) = found["stories"]
        assert story["answer_tokens"] == 200
        assert {event["kind"] for event in story["events"]} >= {"placed", "started", "prefilled"}
        assert len({part["worker"] for part in story["stages"] if part["name"] == "decode"}) == 2
        assert story["placements"]

        before = frontend_pid(up)
        os.kill(before, signal.SIGKILL)
        up.until("another frontend", lambda: up.state()["ready"] and frontend_pid(up) != before and up.answers())
        told = headrace(folder, "trace", answer_id)
        assert told.returncode == 0, told.stderr
        assert "no frontend remembers it; its placements were stored" in told.stdout
        assert "attempt 1 on worker-" in told.stdout
        unknown = headrace(folder, "trace", "chatcmpl-nothing")
        assert unknown.returncode == 1
        assert "no live frontend remembers a request 'nothing'" in unknown.stderr


def frontend_pid(up: RunningUp) -> int:
    """Process id of the frontend that runs now."""
    pid: int = up.state()["frontend"]["pid"]
    return pid
