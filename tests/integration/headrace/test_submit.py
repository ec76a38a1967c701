"""`headrace submit` and `headrace jobs` on a real server: every line once, also when the command is run again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.job_stand_in import answered, carrying

Command = Callable[..., Awaitable[int]]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def command(nats_server: EmbeddedServer, subjects: Subjects) -> Command:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, [*words, "--nats", nats_server.url, "--prefix", subjects.prefix])

    return run


def body(text: str) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def texts(path: Path) -> dict[str, str]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in found}


async def test_every_line_has_its_result(connection: Connection, subjects: Subjects, command: Command, tmp_path: Path) -> None:
    line = {"custom_id": "named", "method": "POST", "url": "/v1/chat/completions", "body": body("xyz")}
    source, out = write(tmp_path / "in.jsonl", [body("abc"), line]), tmp_path / "out.jsonl"
    async with carrying(connection, subjects, "m"):
        assert await command("submit", str(source), "--out", str(out)) == 0
    assert texts(out) == {"line-1": "cba", "named": "zyx"}


async def test_the_same_command_goes_on_where_it_stopped(
    connection: Connection, subjects: Subjects, command: Command, tmp_path: Path
) -> None:
    source, out = write(tmp_path / "in.jsonl", [body(f"n{n}") for n in range(20)]), tmp_path / "out.jsonl"
    async with carrying(connection, subjects, "m") as taken:
        assert await command("submit", str(source), "--out", str(out)) == 0
        kept = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(kept[:12]) + kept[12][:20])  # killed in the middle of a line
        assert await command("submit", str(source), "--out", str(out)) == 0
    assert len(taken) == 20
    assert texts(out) == {f"line-{n + 1}": f"n{n}"[::-1] for n in range(20)}
    assert len(out.read_bytes().splitlines()) == 20


async def test_again_makes_new_jobs_of_the_same_file(
    connection: Connection, subjects: Subjects, command: Command, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [body("abc")])
    async with carrying(connection, subjects, "m") as taken:
        for name, more in (("a", ()), ("b", ("--again", "two"))):
            assert await command("submit", str(source), "--out", str(tmp_path / name), *more) == 0
    assert len(taken) == 2


async def test_a_line_without_an_answer_is_in_the_output_and_in_the_exit_code(
    connection: Connection, subjects: Subjects, command: Command, tmp_path: Path, capsys: Captured
) -> None:
    source, out = write(tmp_path / "in.jsonl", [body("abc")]), tmp_path / "out.jsonl"
    async with carrying(connection, subjects, "m", lambda job: answered(job, status_code=400)):
        assert await command("submit", str(source), "--out", str(out)) == 1
    assert json.loads(out.read_text())["response"]["status_code"] == 400
    assert "1 lines: 0 answered, 1 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [('{"model": "m"}\nnonsense\n', "line 2: no JSON object"), ("\n\n", "has no lines"), ('["a"]\n', "line 1: no JSON object")],
)
async def test_a_broken_file_is_refused_before_anything_is_submitted(
    command: Command, tmp_path: Path, capsys: Captured, text: str, says: str, connection: Connection, subjects: Subjects
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    assert await command("submit", str(source), "--out", str(tmp_path / "out")) == 1
    assert says in capsys.readouterr().err
    assert (await connection.stream_state(subjects.stream("JOB"))).messages == 0


async def test_an_output_that_is_another_file_is_not_touched(command: Command, tmp_path: Path, capsys: Captured) -> None:
    source, out = write(tmp_path / "in.jsonl", [body("abc")]), tmp_path / "notes.txt"
    out.write_text("my notes\n")
    assert await command("submit", str(source), "--out", str(out)) == 1
    assert "is no result" in capsys.readouterr().err
    assert out.read_text() == "my notes\n"


async def test_jobs_are_listed_shown_and_watched(
    connection: Connection, subjects: Subjects, command: Command, tmp_path: Path, capsys: Captured
) -> None:
    await connection.publish(subjects.job("m"), json.dumps(body("abc")).encode(), headers={"Hr-Job": "greeting"})
    assert await command("jobs", "ls") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["greeting", "open", "batch"]
    assert await command("jobs", "show", "greeting") == 1
    assert "has not ended: headrace jobs watch greeting" in capsys.readouterr().err
    async with carrying(connection, subjects, "m"):
        assert await command("jobs", "watch", "greeting") == 0
    assert capsys.readouterr().out.endswith("greeting  ended: done\n")
    assert await command("jobs", "show", "greeting") == 0
    assert json.loads(capsys.readouterr().out)["response"]["body"]["choices"][0]["message"]["content"] == "cba"
    assert await command("jobs", "show", "nothing") == 1
    assert await command("jobs", "cancel", "greeting") == 0
    assert capsys.readouterr().out.split() == ["greeting", "done"]
    assert await command("jobs", "cancel", "nothing") == 1
