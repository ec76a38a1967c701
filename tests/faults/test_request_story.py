"""A request that moved can be followed afterwards by its client's own id: in the log, and in the router's explanation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.faults.test_workers_come_and_go import SLOW, holders
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.fault

NAME = "order-4711"


def test_a_request_that_moved_is_found_by_its_client_s_id(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2", "--routers", "1", *SLOW)
    up.until("the router works", lambda: bool(up.events("router.ready")))
    up.until("both workers joined", lambda: len(holders(up)) == 2)
    killed = ""
    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=60) as api:
        answer = api.completions.create(
            model="sim",
            prompt=list(range(200, 260)),
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-id": NAME},
        )
        for number, chunk in enumerate(answer):
            job = chunk.id.removeprefix("cmpl-")
            if number == 60:
                ((killed, (pid, _)),) = [(worker, held) for worker, held in holders(up).items() if held[1]]
                os.kill(pid, signal.SIGKILL)
    up.until("the answer is logged", lambda: bool(told(up)))
    (line,) = told(up)
    assert (line["request_id"], line["status"], line["finish_reason"]) == (job, 200, "length")
    assert (line["completion_tokens"], line["attempts"], len(line["workers"])) == (200, 2, 2)
    assert line["workers"][0] == killed
    assert 0 <= line["queue_s"] <= line["ttft_s"] < line["seconds"]
    (moved,) = up.events("job.moved")
    assert (moved["request_id"], moved["client_request_id"]) == (job, NAME)
    placed = explained(up, NAME)
    assert explained(up, job) == placed
    assert [(one["attempt"], one["worker"]) for one in placed] == list(enumerate(line["workers"], start=1))
    assert placed[1]["waited_s"] < 0.5 < placed[1]["since_arrival_s"]  # it ran for 0.6 s before it moved


def told(up: RunningUp) -> list[dict[str, Any]]:
    return [event for event in up.events("request.answered") if event.get("client_request_id") == NAME]


def explained(up: RunningUp, wanted: str) -> list[dict[str, Any]]:
    """What the router says of it, oldest decision first, as the command prints it for programs."""
    command = [sys.executable, "-P", "-m", "headrace", "router", "explain", wanted, "--json"]
    environment = {**os.environ, **up.environment()}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    (last,) = json.loads(said.stdout)
    decisions = [{"attempt": 1, **one} for one in (*last["earlier"], last)]
    for one in decisions:
        one.pop("earlier", None)
        one.pop("at")  # converted from the router's own clock at each question
    return decisions
