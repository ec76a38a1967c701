"""Sockets of a vLLM lie in a folder of its own, and are gone with it, or with the start of the next one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.workers.vllm.socket_dir import BASE, LONGEST, SocketFolder


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's has too long a name for a socket
        yield Path(folder)


def test_sockets_are_made_in_it_while_vllm_starts_and_leave_with_it(place: Path) -> None:
    environ: dict[str, str] = {}
    folder = SocketFolder(place)
    with folder.given(environ):
        assert Path(environ[BASE]) == folder.path
        (folder.path / "socket").touch()
    assert environ == {}
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.remove()
    folder.remove()
    assert list(place.iterdir()) == []


def test_a_place_that_the_operator_has_named_stays_and_one_that_is_too_long_is_not_taken(tmp_path: Path) -> None:
    environ = {BASE: "/somewhere"}
    with SocketFolder(tmp_path).given(environ):
        assert environ == {BASE: "/somewhere"}
    deep = tmp_path / ("x" * LONGEST)
    deep.mkdir()
    environ = {}
    with SocketFolder(deep).given(environ):
        assert environ == {}


def test_the_folder_of_one_that_was_killed_goes_with_the_next_start_and_that_of_one_that_lives_stays(tmp_path: Path) -> None:
    begin = "import os, sys; from pathlib import Path; from headrace.workers.vllm.socket_dir import SocketFolder; "
    killed = begin + "SocketFolder(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    alive = SocketFolder(tmp_path)
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], timeout=60, check=False)
    (tmp_path / "headrace-vllm-of-somebody-else").mkdir()
    assert len(list(tmp_path.iterdir())) == 3
    newer = SocketFolder(tmp_path)
    kept = {alive.path, newer.path, tmp_path / "headrace-vllm-of-somebody-else"}
    assert set(tmp_path.iterdir()) == kept
    alive.remove()
    newer.remove()
