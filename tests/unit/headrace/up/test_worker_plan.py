from __future__ import annotations

import asyncio
import stat
import sys
from pathlib import Path

import pytest

from headrace.base.errors import CommandError, SettingsError
from headrace.up import worker_plan as module
from headrace.up.worker_plan import ask_for_worker, socket_of, worker_control, worker_python


@pytest.fixture
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)


@pytest.mark.usefixtures("_nothing_is_installed")
def test_an_engine_may_have_an_environment_beside_this_one(tmp_path: Path) -> None:
    own = tmp_path / ".venv-sglang" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert worker_python("sglang", prefix=str(tmp_path / ".venv")) == str(own)


@pytest.mark.usefixtures("_nothing_is_installed")
def test_an_engine_that_is_installed_nowhere_is_named_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'sglang'.*\.venv-sglang/bin/python"):
        worker_python("sglang", prefix=str(tmp_path / ".venv"))


@pytest.mark.usefixtures("_nothing_is_installed")
def test_other_engines_run_in_this_environment() -> None:
    assert worker_python("sim") == worker_python("my:Engine") == sys.executable


def test_an_engine_that_is_installed_here_runs_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert worker_python("sglang", prefix=str(tmp_path)) == sys.executable


async def test_a_worker_is_started_and_its_name_is_answered(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def start(model: str, role: str) -> str:
        asked.append((model, role))
        return "worker-2"

    path = tmp_path / "up.sock"
    async with worker_control(path, start):
        assert await ask_for_worker(str(path), model="m", role="decode") == "worker-2"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert asked == [("m", "decode")]
    assert not path.exists()


async def test_a_refusal_is_told_and_so_is_what_is_no_command(tmp_path: Path) -> None:
    def start(model: str, role: str) -> str:
        raise SettingsError("no such pool")

    path = tmp_path / "up.sock"
    async with worker_control(path, start):
        with pytest.raises(CommandError, match="no such pool"):
            await ask_for_worker(str(path), model="m", role="decode")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"[1]\n")
        assert b"no command" in await reader.readline()
        writer.close()


async def test_a_supervisor_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="does not answer"):
        await ask_for_worker(str(tmp_path / "up.sock"), model="m", role="decode")


async def test_a_folder_in_which_no_socket_can_be_made_does_not_keep_up_from_running(tmp_path: Path) -> None:
    async with worker_control(tmp_path / ("x" * 150) / "up.sock", lambda _model, _role: ""):
        pass


def test_the_socket_is_beside_the_run_file(tmp_path: Path) -> None:
    assert socket_of(tmp_path) == tmp_path / "run" / "up.sock"
