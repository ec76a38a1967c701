"""Every query of the dashboards returns data on a real Prometheus that scrapes a deployment whose worker is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.pages import DASHBOARDS
from headrace.up.parts import choose_port
from tests.docs.promql import FOLDER
from tests.faults.test_workers_come_and_go import SLOW
from tests.support.prometheus_programs import program
from tests.support.up_process import RunningUp, routed_up

PROMETHEUS = program("prometheus")
pytestmark = [
    pytest.mark.fault,
    pytest.mark.deployment,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not here: `make monitors` unpacks it"),
]

WITHIN_S = 120.0
RATE = "60s"
KEY = {"Authorization": "Bearer a-key"}  # tenants are counted where API keys are in force
KEYS = ("--api-key", "a-key", "--open-metrics")
# Panels of which this run has no event to show. Their metrics and labels are checked in tests/docs/test_dashboards.py.
NOTHING_HAPPENED = {
    "Refused",
    "Refused by code",
    "Missing tokens asked for",
    "Pull loops begun anew",
    "Where prompts are computed",
    "Parts of a remote prefill, p90",
}


def fetch(url: str, body: Any = None, *, timeout_s: float = 60.0) -> Any:
    """The JSON of an answer, or its text."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **KEY})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        text = answer.read().decode()
    return text if text.startswith("data:") else json.loads(text)


class Prometheus:
    """A Prometheus that scrapes a running deployment every second."""

    def __init__(self, folder: Path, running: RunningUp) -> None:
        state = running.state()
        jobs = {
            "headrace-frontend": [state["frontend"]["port"]],
            "headrace-worker": [part["metrics_port"] for part in state["workers"]],
            "headrace-router": [part["metrics_port"] for part in state["routers"]],
        }
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FOLDER / name) for name in ("recording_rules.yaml", "alerts.yaml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
                for job, ports in jobs.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        self._folder = folder
        self._start()

    def _start(self) -> None:
        port = choose_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port}"
        assert PROMETHEUS is not None
        with (self._folder / "prometheus.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--enable-feature=exemplar-storage",
                ],
                stdout=log,
                stderr=log,
            )

    def answers(self) -> bool:
        """Whether it answers. One whose port was taken before it had it is started anew on another one."""
        if self.process.poll() is not None:
            assert "address already in use" in (self._folder / "prometheus.log").read_text()
            self._start()
        try:
            return self.has_data("vector(1)")
        except OSError:
            return False

    def has_data(self, query: str) -> bool:
        """Whether a query has a number for an answer. Raises HTTPError for one that cannot be run."""
        wanted = urllib.parse.urlencode({"query": query})
        found = fetch(f"{self.url}/api/v1/query?{wanted}")["data"]["result"]
        return any(sample["value"][1] != "NaN" for sample in found)

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in fetch(f"{self.url}/api/v1/rules")["data"]["groups"] for rule in group["rules"]]


@contextmanager
def scraped(folder: Path, running: RunningUp) -> Iterator[Prometheus]:
    prometheus = Prometheus(folder, running)
    try:
        running.until("Prometheus answers", prometheus.answers)
        yield prometheus
    finally:
        prometheus.process.kill()
        prometheus.process.wait()


def chat(url: str, number: int, tokens: int) -> None:
    """A streamed chat. Half of all have a long beginning in common."""
    text = ("once upon a time " * 60 if number % 2 else "") + f"number {number}"
    body = {"model": "sim", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}
    with suppress(urllib.error.HTTPError):
        fetch(f"{url}/v1/chat/completions", body)


def batch(url: str) -> None:
    """A batch of a few lines."""
    body = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(8)]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    mark = "mark"
    form = (
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{content}\r\n--{mark}--\r\n'
    )
    request = urllib.request.Request(
        f"{url}/v1/files", form.encode(), {"Content-Type": f"multipart/form-data; boundary={mark}", **KEY}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        file = json.load(answer)["id"]
    made = fetch(
        f"{url}/v1/batches",
        {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    )
    deadline = time.monotonic() + WITHIN_S
    while fetch(f"{url}/v1/batches/{made['id']}")["status"] != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.5)
    output = fetch(f"{url}/v1/batches/{made['id']}")["output_file_id"]
    content_of = urllib.request.Request(f"{url}/v1/files/{output}/content", headers=KEY)
    with urllib.request.urlopen(content_of, timeout=30) as answer:
        assert answer.read()


def load(running: RunningUp) -> None:
    """Work of every kind, and a worker killed while it streams."""
    url = running.state()["url"]
    with ThreadPoolExecutor(8) as pool:
        chats = [pool.submit(chat, url, number, 600 if number < 6 else 12) for number in range(60)]
        time.sleep(1.0)
        os.kill(running.state()["workers"][0]["pid"], signal.SIGKILL)
        with pytest.raises(urllib.error.HTTPError):
            fetch(f"{url}/v1/chat/completions", {"model": "none", "messages": []})
        batch(url)
        for done in chats:
            done.result(timeout=WITHIN_S)


def queries() -> dict[str, str]:
    """Every query of the dashboards, with where it is."""
    return {
        query.expr.replace("$__rate_interval", RATE)
        .replace("$model", ".*")
        .replace("$pool", ".*")
        .replace("$instance", ".*"): f"{page.title}: {panel.title}"
        for page in DASHBOARDS
        for panel in page.panels
        for query in panel.queries
    }


def test_every_query_returns_data_and_every_rule_is_evaluated(tmp_path: Path) -> None:
    with (
        routed_up(tmp_path, "--workers", "2", "--routers", "1", *KEYS, *SLOW) as running,
        scraped(tmp_path, running) as prometheus,
    ):
        running.until("the first scrape", lambda: prometheus.has_data("headrace_worker_ready"))
        load(running)
        wanted = queries()
        empty = set(wanted)
        deadline = time.monotonic() + WITHIN_S
        while empty and time.monotonic() < deadline:
            time.sleep(1.0)
            empty = {query for query in empty if not prometheus.has_data(query)}
            if {wanted[query].partition(": ")[2].partition(": ")[2] for query in empty} <= NOTHING_HAPPENED:
                break
        missing = {wanted[query]: query for query in empty if wanted[query].rpartition(": ")[2] not in NOTHING_HAPPENED}
        assert missing == {}
        rules = prometheus.rules()
        assert len(rules) > 25
        assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] != "ok"} == {}
