"""A `headrace up` that is frozen reads no logs of its parts, and these go on all the same."""

from __future__ import annotations

import http.client
import json
import signal
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.up_process import routed_up

ROUND = 500
MOST = 20_000  # requests; their lines are several times what a pipe and the frontend's memory take
LOST = "headrace_log_lost_writes_total"


def lost(metrics: str) -> float:
    return sum(float(line.split()[1]) for line in metrics.splitlines() if line.startswith(LOST))


@pytest.mark.deployment
def test_a_frontend_answers_while_nobody_reads_its_log_and_says_afterwards_what_is_missing(tmp_path: Path) -> None:
    with (
        routed_up(tmp_path, "--workers", "1") as up,
        closing(http.client.HTTPConnection(urlsplit(up.state()["url"]).netloc, timeout=20)) as client,
    ):

        def get(path: str) -> str:
            client.request("GET", path, headers={"x-request-id": "x" * 128})
            return client.getresponse().read().decode()

        up.process.send_signal(signal.SIGSTOP)
        asked = 0
        while not lost(get("/metrics")) and asked < MOST:
            for _ in range(ROUND):
                get("/version")
            asked += ROUND
        assert lost(get("/metrics")) > 0, "the log was never full"
        assert up.chat()
        up.process.send_signal(signal.SIGCONT)
        up.until("the loss is told", lambda: bool(up.events("log.lost")))
        assert up.events("log.lost")[0]["writes"] > 0
        kept = [json.loads(line) for line in up.log_file.read_text().splitlines()]
        assert sum(line["event"] == "request.answered" for line in kept) > ROUND
