"""The console of a running `headrace up`: its link, what it shows, what the key allows, a kill seen in the playground."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import running_browser
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.deployment, pytest.mark.fault, pytest.mark.timeout(300)]

SLOW = ("--engine-arg", 'timing_overrides={"decode_base_s": 0.03}')


@contextmanager
def deployed(folder: Path, *flags: str) -> Iterator[tuple[RunningUp, str, str]]:
    """Yield a deployment with a console that answers, the console's address and its key."""
    up = RunningUp(folder, "--console", "--workers", "2", *flags)
    try:
        up.until_ready()
        up.until("the link", lambda: "/console#key=" in up.out_file.read_text())
        found = re.search(r"(http://\S+)/console#key=(\S+)", up.out_file.read_text())
        assert found is not None
        address, key = found.groups()
        up.until("the console", lambda: answers(address))
        yield up, address, key
    finally:
        up.stop()


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/console/api/access").status_code == 200
    except httpx.TransportError:
        return False


def first_update(address: str, tables: str, key: str) -> dict[str, Any]:
    with httpx.stream("GET", f"{address}/console/events?tables={tables}", headers={"x-console-key": key}, timeout=30) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
    raise AssertionError("the stream ended")


TABLES = "summary,pools,workers,queues,streams,routers,prefixes,letters,batches,models"


def test_it_shows_the_deployment_and_changes_nothing_without_the_key(tmp_path: Path) -> None:
    with deployed(tmp_path, "--routers", "1", "--nats-login", "none") as (up, address, key):
        assert up.state()["console"]["url"] == f"{address}/console"
        assert key not in up.log_file.read_text()
        assert key not in up.run_file.read_text()

        def placed_by_the_router() -> bool:  # before it is there, workers place requests on themselves
            return up.answers() and bool(httpx.get(f"{address}/console/api/requests").json()["placements"])

        up.until("a placement", placed_by_the_router)
        shown = first_update(address, TABLES, "")
        assert shown.get("troubles") is None, shown["troubles"]
        assert set(shown) == set(TABLES.split(","))
        assert shown["summary"]["all"]["deployment"]["workers"] == 2
        assert {row["model"] for row in shown["models"]["all"].values()} == {"sim"}
        assert shown["streams"]["all"]["HR_WORK"]["consumers"] == 2
        placed = httpx.get(f"{address}/console/api/requests").json()["placements"]
        story = httpx.get(f"{address}/console/api/requests/{placed[0]['id']}").json()
        assert story["stories"][0]["finish"]
        assert story["stories"][0]["stages"][-1]["name"] == "decode"
        assert story["decided"][0]["candidates"]
        unknown = httpx.get(f"{address}/console/api/requests/{'0' * 26}")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
        worker = placed[0]["worker"]
        for path in (f"workers/{worker}/kill", f"workers/{worker}/drain", "letters/1/drop", "letters/1/retry"):
            assert httpx.post(f"{address}/console/api/{path}").status_code == 403
            assert httpx.get(f"{address}/console/api/{path}", headers={"x-console-key": key}).status_code == 405
        foreign = {"origin": "https://evil.example", "x-console-key": key}
        assert httpx.post(f"{address}/console/api/workers/{worker}/kill", headers=foreign).status_code == 403
        assert httpx.get(f"{address}/console", headers={"host": "evil.example"}).status_code == 403
        gone = httpx.post(f"{address}/console/api/letters/1/drop", headers={"x-console-key": key})
        assert (gone.status_code, gone.json()["error"]["code"]) == (409, "not_done")
        metrics = httpx.get(f"{address}/metrics").text
        assert 'headrace_stream_consumers{stream="HR_WORK"} 2.0' in metrics
        assert 'headrace_stream_missing{stream="HR_REQ"} 0.0' in metrics
        bad = httpx.get(f"{address}/console/events?tables=secrets")
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "unknown_table")


def test_where_keys_are_asked_for_nothing_is_shown_without_the_consoles(tmp_path: Path) -> None:
    with deployed(tmp_path, "--auth", "keys") as (_, address, key):
        assert httpx.get(f"{address}/console/events?tables=workers").status_code == 401
        assert httpx.get(f"{address}/console/api/requests").status_code == 401
        assert httpx.get(f"{address}/metrics").status_code == 401
        assert httpx.get(f"{address}/metrics", headers={"authorization": f"Bearer {key}"}).status_code == 200
        workers = first_update(address, "workers", key)["workers"]["all"]
        headers = {"x-console-key": key}
        killed = httpx.post(f"{address}/console/api/workers/{next(iter(workers))}/kill", headers=headers)
        assert (killed.status_code, killed.json()["error"]["code"]) == (403, "no_kills")
        drained = httpx.post(f"{address}/console/api/workers/{next(iter(workers))}/drain", headers=headers)
        assert drained.status_code == 200, drained.text


def test_an_answer_goes_on_before_the_eyes_when_its_worker_is_killed(tmp_path: Path) -> None:
    with running_browser() as browser, deployed(tmp_path, *SLOW) as (up, address, key):
        page = browser.page()
        page.goto(f"{address}/console#key={key}")
        page.see("Workers serving")
        page.run("location.hash = '#/playground'")
        page.until("document.querySelector('select')?.value === 'sim'")
        page.press_button("Send")
        page.until("document.getElementById('answer')?.innerText.length > 100")
        page.press_button("Kill the worker now")
        page.see("goes on with the next token")
        page.see("ended: length")
        text = page.run("document.getElementById('answer').innerText")
        body = {"model": "sim", "messages": [{"role": "user", "content": "Tell me about rivers."}], "max_tokens": 400}
        again = httpx.post(f"{up.state()['url']}/v1/chat/completions", json=body, timeout=120).json()
        assert text.split() == again["choices"][0]["message"]["content"].split(), "nothing is missing and nothing repeated"
        page.run("[...document.querySelectorAll('a')].find((a) => a.innerText.includes('The story')).click()")
        page.see("moved away from")
        assert browser.problems == []


def test_beside_a_deployment_it_finds_server_and_frontend_by_its_run_file(tmp_path: Path) -> None:
    up = RunningUp(tmp_path, "--workers", "1", "--routers", "0")
    try:
        up.until_ready()
        assert up.state()["console"] is None
        command = [sys.executable, "-P", "-m", "headrace", "console", "--console-port", "0"]
        with (tmp_path / "console.log").open("wb") as log:
            beside = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert beside.stdout is not None
            found = re.search(r"(http://\S+)/console#key=(\S+)", beside.stdout.readline())
            assert found is not None, (tmp_path / "console.log").read_text()
            address, key = found.groups()
            up.until("the console", lambda: answers(address))
            assert httpx.get(f"{address}/console/api/requests").status_code == 401, "where NATS asks for logins, it does so too"
            headers = {"x-console-key": key}
            access = httpx.get(f"{address}/console/api/access", headers=headers).json()
            assert (access["admin"], access["kills"], access["frontend"]) == (True, False, up.state()["url"])
            assert httpx.get(f"{address}/console/api/chat/models", headers=headers).json()["data"][0]["id"] == "sim"
            beside.terminate()
            assert beside.wait(30) == 0
        finally:
            beside.kill()
            beside.communicate()
    finally:
        up.stop()
