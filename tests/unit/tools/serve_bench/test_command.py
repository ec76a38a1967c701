"""`headrace bench serve` as it is typed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.cli import main
from tests.unit.tools.serve_bench.fake_server import REFUSED, serving, streamed


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
