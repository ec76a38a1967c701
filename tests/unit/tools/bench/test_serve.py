"""What is drawn of a run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli import main
from headrace.tools.bench.load import Outcome
from headrace.tools.bench.serve import CLIENT, HEIGHT, WIDTH, Usage, draw, latency, make_report, processes_of, render
from tests.unit.tools.bench.fake_server import REFUSED, serving, streamed

SVG = "{http://www.w3.org/2000/svg}"


def test_each_curve_rises_inside_the_picture() -> None:
    root = ET.fromstring(draw({"first token": [3.0, 1.0, 200.0] * 500, "whole answer": [5.0], "none": []}))  # noqa: S314  # drawn by us
    lines = [line.attrib["points"] for line in root.iter(f"{SVG}polyline")]
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.split()]
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    names = [text.text for text in root.iter(f"{SVG}text")]
    assert "first token" in names
    assert "none" not in names


_WAITS = "import sys; sys.stdin.read()"


@contextmanager
def running(*commands: str) -> Iterator[list[int]]:
    """Run children whose command lines have these words."""
    with ExitStack() as stack:
        pids = []
        for command in commands:
            child = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", _WAITS, *command.split()], stdin=subprocess.PIPE)
            )
            stack.callback(child.kill)
            pids.append(child.pid)
        deadline = time.monotonic() + 30
        while not all(_WAITS.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):  # not executed yet
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield pids


def found_here() -> dict[str, int]:
    """The children of this process, without the nats-server that other tests of the same run may use."""
    return {name: pid for name, pid in processes_of(Path(), os.getpid()).items() if name != "nats-server"}


def test_one_frontend_has_the_plain_name() -> None:
    with running("frontend --port 1", "router", "worker") as (frontend, router, worker):
        found = found_here()
    assert found == {"frontend": frontend, "router-1": router, "worker-1": worker}


def test_each_of_several_frontends_is_measured() -> None:
    with running("frontend --port 1", "frontend --port 1") as frontends:
        found = found_here()
    assert found == {"frontend-1": min(frontends), "frontend-2": max(frontends)}


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1))
def test_percentiles_are_values_in_order(values: list[tuple[float, int]]) -> None:
    found = latency(values)
    assert found.p50 is not None
    assert found.p90 is not None
    assert found.p99 is not None
    assert found.most == max(value for value, _ in values) * 1e3
    assert found.p50 <= found.p90 <= found.p99 <= found.most
    spread = sorted(value * 1e3 for value, times in values for _ in range(times))
    assert found.p50 == spread[-(-len(spread) // 2) - 1]


def test_cpu_is_that_of_the_run_per_second_and_per_request() -> None:
    outcome = Outcome(seconds=2.0, ok=4, chunks=8)
    before = {CLIENT: Usage(1.0, 0), "router-1": Usage(5.0, 0), "gone": Usage(1.0, 0)}
    after = {CLIENT: Usage(1.2, 2**20), "router-1": Usage(6.0, 3 * 2**20)}
    report = make_report(outcome, before, after, {"loop": "closed"})
    assert (report.requests_per_s, report.tokens_per_s) == (2.0, 4.0)
    router = report.processes["router-1"]
    assert (router.cores, router.us_per_request, router.rss_mib) == (0.5, 250_000.0, 3.0)
    assert set(report.processes) == {CLIENT, "router-1"}
    assert "may be what was measured" not in render(report)


def test_a_client_that_is_busy_itself_is_told() -> None:
    report = make_report(Outcome(seconds=1.0, ok=1), {CLIENT: Usage(0.0, 0)}, {CLIENT: Usage(0.9, 0)}, {})
    assert "may be what was measured" in render(report)


async def run(*arguments: str, answer: bytes) -> int:
    async with serving(lambda _: answer) as (server, _):
        command = ["bench", "serve", f"http://127.0.0.1:{server.port}", "--model", "m", "--warm-up", "0", *arguments]
        return await asyncio.to_thread(main, command)


async def test_a_run_is_printed_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, plot = tmp_path / "run.json", tmp_path / "run.svg"
    arguments = ("--requests", "6", "--streams", "2", "--tokens", "3", "--json", str(figures), "--plot", str(plot))
    assert await run(*arguments, "--data-dir", str(tmp_path), answer=streamed(3)) == 0
    assert "6 answered, 0 failed" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert (found["ok"], found["conditions"]["streams"]) == (6, 2)
    assert list(found["processes"]) == ["client"]
    assert plot.read_text().startswith("<svg")


async def test_a_request_that_failed_makes_the_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("--requests", "2", "--rate", "100", "--poisson", "--data-dir", str(tmp_path), answer=REFUSED) == 1
    assert "429" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--poisson"], "--poisson needs --rate"),
        (["--rate", "1", "--trace", "x.jsonl"], "--rate and --trace"),
        (["--trace", "missing.jsonl"], "missing.jsonl"),
        (["--json", "/no/such/folder/run.json"], "cannot write"),
    ],
)
async def test_options_that_cannot_be_are_told(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("--requests", "1", "--data-dir", str(tmp_path), *arguments, answer=streamed(1)) != 0
    assert told in capsys.readouterr().err
