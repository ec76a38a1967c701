"""`headrace up` says of each part that ended badly that it is gone, and of nobody else."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from headrace.config.settings import load
from headrace.up import parts
from headrace.up.parts import Parts, Reaped
from headrace.up.reaped_parts import ReapedParts
from headrace.up.restart_policy import ManagedProcess, RestartState
from headrace.up.supervisor import Supervisor, say_ready, until_answering
from headrace.up.terminal import Terminal


def part(role: str) -> ManagedProcess:
    return ManagedProcess("one", (), dict(os.environ), RestartState(essential=False), role=role)


@pytest.mark.parametrize(
    ("role", "script", "announced"),
    [
        ("aggregated", "exit 9", 1),
        ("aggregated", "exit 0", 0),
        ("", "exit 9", 1),
        ("", "exit 0", 0),
        ("prefill", "kill -9 $$", 1),
    ],
)
async def test_only_a_part_that_ended_badly_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, script: str, announced: int
) -> None:
    heard: list[Reaped] = []
    monkeypatch.setattr(ReapedParts, "add", lambda _self, reaped: heard.append(reaped))
    monkeypatch.setattr("headrace.up.supervisor.headrace_command", lambda *_argv, **_options: ["/bin/sh", "-c", script])
    settings = load("up", flags={"data_dir": str(tmp_path)})
    supervisor = Supervisor(settings, terminal=Terminal(io.StringIO(), json_lines=True, colour=False), part_env={})
    await supervisor._run_once(part(role))
    assert len(heard) == announced


async def test_one_that_was_to_stop_is_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReapedParts, "add", lambda _self, _reaped: pytest.fail("it was told to stop"))
    monkeypatch.setattr("headrace.up.supervisor.headrace_command", lambda *_argv, **_options: ["/bin/sh", "-c", "exit 9"])
    settings = load("up", flags={"data_dir": str(tmp_path)})
    supervisor = Supervisor(settings, terminal=Terminal(io.StringIO(), json_lines=True, colour=False), part_env={})
    stopping = part("aggregated")
    stopping.stop_asked.set()
    await supervisor._run_once(stopping)


async def test_a_run_file_that_cannot_be_written_ends_nothing_and_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.up.supervisor._PUBLISH_AGAIN_S", 0.01)
    settings = load("up", flags={"data_dir": str(tmp_path)})
    supervisor = Supervisor(settings, terminal=Terminal(io.StringIO(), json_lines=True, colour=False), part_env={})
    supervisor._parts = Parts(frontends=(part(""),))
    written: list[dict[str, Any]] = []

    def write(state: dict[str, Any]) -> None:
        written.append(state)
        if len(written) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervisor._run_file, "write", write)
    supervisor._publish_state()
    async with asyncio.timeout(5):
        while len(written) < 2:
            await asyncio.sleep(0.01)


async def test_what_a_second_interrupt_kills_has_not_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.up.supervisor.headrace_command", lambda *_argv, **_options: ["/bin/sh", "-c", "sleep 600"])
    settings = load("up", flags={"data_dir": str(tmp_path)})
    supervisor = Supervisor(settings, terminal=Terminal(io.StringIO(), json_lines=True, colour=False), part_env={})
    frontend = ManagedProcess("frontend", (), dict(os.environ), RestartState(essential=True))
    supervisor._parts = Parts(frontends=(frontend,))
    with capture_logs() as logged:
        keeping = asyncio.create_task(supervisor._keep(frontend))
        while frontend.child is None:
            await asyncio.sleep(0.01)
        supervisor._insist()
        await asyncio.wait_for(keeping, 10)
    assert frontend.state.starts == 1
    assert "part.crashed" not in [event["event"] for event in logged]


class Frontend:
    """What a frontend says at each question about `/ready`; the last answer stays."""

    def __init__(self, *answers: tuple[int, list[str]]) -> None:
        self._answers = list(answers)

    async def get(self, _host: str, _port: int, path: str, *, tls: bool = False) -> tuple[int, bytes]:
        if path != "/ready":
            return 0, b""
        status, models = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return status, json.dumps({"models": models}).encode() if status else b""


async def test_a_frontend_that_falls_silent_after_it_was_ready_does_not_take_the_model_from_the_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    frontend = Frontend((0, []), (503, []), (200, ["acme/m"]), (503, []))
    monkeypatch.setattr(parts, "get", frontend.get)
    terminal = Terminal(io.StringIO(), json_lines=True, colour=False)
    models = await until_answering(
        terminal, "127.0.0.1", [1], tls=False, waiting_for=lambda: "a model", began_s=time.monotonic()
    )
    assert models == ["acme/m"]
    await say_ready("127.0.0.1", 8000, tls=False, models=models, after_s=1.0)
    block = capsys.readouterr().out
    assert "Headrace is ready after 1.0 s and serves acme/m." in block
    assert '"model": "acme/m"' in block
