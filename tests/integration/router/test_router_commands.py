"""`headrace router` as a user runs it: ready, explaining itself on the command line and in a header, drained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.up_process import RunningUp, routed_up

pytestmark = pytest.mark.deployment


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with routed_up(tmp_path_factory.mktemp("up"), "--workers", "2", "--routers", "1") as running:
        yield running


def headrace(up: RunningUp, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **up.environment()}
    command = [sys.executable, "-P", "-m", "headrace", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def ask(up: RunningUp, *, begin: int = 300, **headers: str) -> tuple[dict[str, Any], Any]:
    body = {"model": "sim", "prompt": list(range(begin, begin + 300)), "max_tokens": 4}
    request = urllib.request.Request(
        f"{up.state()['url']}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer), answer.headers


def test_a_decision_is_told_in_a_header_and_on_the_command_line(up: RunningUp) -> None:
    answer, headers = ask(up, X_Headrace_Explain="1")
    told = json.loads(headers["x-headrace-decision"])
    assert told["known"]
    assert told["router"].startswith("router-1-")
    assert len(told["candidates"]) == 2
    said = headrace(up, "router", "explain", answer["id"])
    assert said.returncode == 0, said.stderr
    assert f"placed on {told['worker']}" in said.stdout
    (machine,) = json.loads(headrace(up, "router", "explain", answer["id"], "--json").stdout)
    assert (machine["worker"], machine["router"]) == (told["worker"], told["router"])


def test_what_no_router_knows_is_said(up: RunningUp) -> None:
    said = headrace(up, "router", "explain", "nobody-asked-this")
    assert said.returncode == 1
    assert "'nobody-asked-this'" in said.stderr


def test_a_request_goes_to_the_worker_it_names(up: RunningUp) -> None:
    told = json.loads(ask(up, X_Headrace_Explain="1")[1]["x-headrace-decision"])
    workers = [candidate["worker"] for candidate in told["candidates"]]
    for worker in workers:
        told = json.loads(ask(up, X_Headrace_Explain="1", X_Headrace_Worker=worker)[1]["x-headrace-decision"])
        assert (told["worker"], told["reason"]) == (worker, "direct")


def test_the_cached_prefix_decides(up: RunningUp) -> None:
    # A prompt that nobody else here asks for: it is on one worker only.
    first = json.loads(ask(up, begin=700, X_Headrace_Explain="1")[1]["x-headrace-decision"])
    (other,) = {candidate["worker"] for candidate in first["candidates"]} - {first["worker"]}

    def seen_idle() -> bool:
        told = json.loads(ask(up, begin=100, X_Headrace_Explain="1", X_Headrace_Worker=other)[1]["x-headrace-decision"])
        (there,) = [candidate for candidate in told["candidates"] if candidate["worker"] == first["worker"]]
        return not there.get("pending") and not there.get("running")

    up.until("the router has heard that the answer is complete", seen_idle)  # the client may know before
    again, headers = ask(up, begin=700, X_Headrace_Explain="1")
    told = json.loads(headers["x-headrace-decision"])
    assert (told["worker"], told["reason"]) == (first["worker"], "prefix"), (first, told)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 200


def test_status_shows_the_routers(up: RunningUp) -> None:
    said = headrace(up, "router", "status")
    assert said.returncode == 0
    assert "router-1-" in said.stdout
    assert " held " in said.stdout
    (row,) = json.loads(headrace(up, "router", "status", "--json").stdout)
    assert row["state"]["lease_held"]


def test_wrong_settings_of_a_router_end_it_with_78_and_a_name(up: RunningUp) -> None:
    for flags, wrong in (
        (("--policy", "kw"), "router.policy"),
        (("--tuning", "congestio=3"), "congestio"),
        (("--tuning", "candidates=0"), "candidates"),
        (("--tenant-weight", "a=-1"), "weights"),
        (("--tier-weight", "tape=1"), "tape"),
    ):
        said = headrace(up, "router", *flags)
        assert said.returncode == 78, said.stderr
        assert wrong in said.stderr


def test_a_stopped_router_drains_and_nobody_misses_it(up: RunningUp) -> None:
    os.kill(up.state()["routers"][0]["pid"], signal.SIGHUP)
    up.until("it has left", lambda: [event["reason"] for event in up.events("part.left")] == ["drained"])
    _, headers = ask(up, X_Headrace_Explain="1")
    told = json.loads(headers["x-headrace-decision"])
    assert told["known"] is False
    assert "no router" in told["reason"]
    assert "no router is running" in headrace(up, "router", "status").stdout
    assert headrace(up, "router", "explain", "x").returncode == 1
