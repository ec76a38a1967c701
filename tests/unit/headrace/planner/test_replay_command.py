"""`headrace planner replay`: over what routers recorded in the last days, and over a file."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.codec import encode
from headrace.broker.messages.control import Routed
from headrace.cli import main
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects

DAY_S = 86_400.0
EASY = ("--most", "3", "--ttft", "5", "--itl", "1", "--json")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """Return what the command prints of each pool."""
    assert main(["planner", "replay", *EASY, *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


async def test_the_records_of_the_last_days_are_played_again_with_the_planner_and_with_fixed_numbers(
    connection: Connection,
    subjects: Subjects,
    nats_server: EmbeddedServer,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    now = time.time()
    for n in range(20):
        lately = Routed(at=now - 6 * DAY_S + n, id=f"r{n}", worker="w", tokens=100, uncached=100)
        connection.send(subjects.route("m-1"), encode(lately))
    connection.send(subjects.route("m-1"), encode(Routed(at=now - 8 * DAY_S, id="old", worker="w", tokens=100, uncached=100)))
    async with asyncio.timeout(10):
        while (await connection.stream_state(subjects.stream("ROUTE"))).messages < 21:
            await asyncio.sleep(0.02)
    place = ("--nats", nats_server.url, "--prefix", subjects.prefix)
    (pool,) = await asyncio.to_thread(told, capsys, "--last", "7d", *place)
    assert (pool["pool"], pool["requests"]) == ("m-1", 20)
    assert [one["who"] for one in pool["played"]] == ["planner", "always 1"]
    assert all(one["attained"] == 1.0 for one in pool["played"])
    assert sum(pool["reasons"].values()) > 0


def test_a_file_is_played_without_a_server_and_all_of_its_requests_are_answered(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"2023-11-16 18:{17 + n // 60:02d}:{n % 60:02d}.0000000,100,5" for n in range(200)]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    (trace,) = told(capsys, "--trace", "trace.csv")
    assert trace["requests"] == 200
    assert {one["who"] for one in trace["played"]} == {"planner", "always 1"}
    assert all(0 < one["worker_hours"] < 1 for one in trace["played"])
