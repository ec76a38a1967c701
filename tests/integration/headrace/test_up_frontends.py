"""`headrace up --frontends N`: several frontends answer on one port, and one that dies takes its own connections only."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.process import REFUSE
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.deployment


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningUp]]:
    running: list[RunningUp] = []

    def start(*flags: str) -> RunningUp:
        folder = tmp_path / str(len(running))
        folder.mkdir()
        running.append(RunningUp(folder, *flags))
        return running[-1]

    yield start
    for up in running:
        up.stop()


def answers_itself(part: dict[str, Any]) -> bool:
    """Whether this frontend answers on its own port."""
    connection = http.client.HTTPConnection("127.0.0.1", part["metrics_port"], timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def counted(part: dict[str, Any], metric: str) -> int:
    """The sum of the series of this frontend that begin so."""
    with urllib.request.urlopen(f"http://127.0.0.1:{part['metrics_port']}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric)))


def chats(part: dict[str, Any]) -> int:
    """How many chats this frontend has answered, by its own metrics."""
    return counted(part, 'headrace_frontend_requests_total{route="/v1/chat/completions"')


def test_several_frontends_share_one_port_and_each_has_one_of_its_own(start: Callable[..., RunningUp]) -> None:
    up = start("--frontends", "2")
    up.until_ready()
    state = up.state()
    frontends = state["frontends"]
    assert [part["name"] for part in frontends] == ["frontend-1", "frontend-2"]
    assert {part["port"] for part in frontends} == {state["frontend"]["port"]}
    assert len({part["metrics_port"] for part in frontends}) == 2
    assert all(answers_itself(part) for part in frontends), "it was said to be ready"
    up.until("the kernel gives both some connections", lambda: bool(up.chat()) and all(map(chats, frontends)))
    pids = [part["pid"] for part in frontends]
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(30) == 0, up.log()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", state["frontend"]["port"]), timeout=1):
        pass


def test_one_that_is_killed_leaves_the_others_serving_and_comes_back(start: Callable[..., RunningUp]) -> None:
    up = start("--frontends", "2")
    up.until_ready()
    first, second = up.state()["frontends"]
    os.kill(first["pid"], signal.SIGKILL)
    assert answers_itself(second)
    up.until("it answers again", lambda: up.state()["frontends"][0]["pid"] != first["pid"] and answers_itself(first))
    assert up.chat()
    assert up.state()["frontends"][1]["pid"] == second["pid"]


def background(part: dict[str, Any], path: str = "", body: Any = None) -> dict[str, Any]:
    """Start a background response at this frontend, or read one."""
    url = f"http://127.0.0.1:{part['metrics_port']}/v1/responses{path}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_the_stored_jobs_of_one_that_is_killed_are_taken_over_before_their_redelivery(start: Callable[..., RunningUp]) -> None:
    up = start("--frontends", "2", "--engine-arg", 'timing_overrides={"decode_base_s": 0.05}')
    up.until_ready()
    first, second = up.state()["frontends"]
    body = {"model": "sim", "input": "Once", "max_output_tokens": 200, "background": True}  # 10 s
    asked = [background(second, body=body)["id"] for _ in range(12)]  # both carry some
    up.until("the first carries some", lambda: counted(first, 'headrace_jobs_carried{state="running"') > 0)
    os.kill(first["pid"], signal.SIGKILL)
    up.until("all are answered", lambda: all(background(second, f"/{one}")["status"] == "incomplete" for one in asked))
    (adopted,) = up.events("jobs.adopted")
    assert 0 < adopted["jobs"] < 12


def test_one_that_is_to_refuse_requests_while_it_starts_is_not_killed(start: Callable[..., RunningUp]) -> None:
    up = start()
    up.until("it starts", lambda: up.state()["frontends"][0]["pid"])
    os.kill(up.state()["frontends"][0]["pid"], REFUSE)
    up.until_ready()
    assert not up.events("part.crashed")


def test_one_that_is_asked_to_end_finishes_its_answers_first(start: Callable[..., RunningUp]) -> None:
    up = start("--frontends", "2", "--engine-arg", 'timing_overrides={"decode_base_s": 0.05}')
    up.until_ready()
    tokens = 130  # 6.5 s
    first = up.state()["frontends"][0]
    body = {"model": "sim", "prompt": "Once", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", first["metrics_port"], timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: {")
    os.kill(first["pid"], signal.SIGTERM)
    rest = answer.read()
    connection.close()
    assert rest.endswith(b"data: [DONE]\n\n"), rest[-500:]
    up.until("it is there again", lambda: up.state()["frontends"][0]["pid"] != first["pid"] and answers_itself(first))


def test_a_second_up_does_not_share_the_port_of_the_first(start: Callable[..., RunningUp]) -> None:
    up = start("--frontends", "2")
    up.until_ready()
    other = start("--frontends", "2", "--port", str(up.state()["frontend"]["port"]))
    assert other.process.wait(30) == 78, other.log()
    assert "cannot listen on" in other.log() + other.out_file.read_text()
    assert up.chat()
