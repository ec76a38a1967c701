"""A process of this machine is there, or it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.broker.membership.local_processes import machine_id, process_gone


def test_a_process_is_there_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not process_gone(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_gone(child.pid), "it only waits to be reaped"
    child.communicate()
    assert process_gone(child.pid)


def test_what_is_not_known_is_not_gone() -> None:
    assert not process_gone(0)
    assert not process_gone(-1)
    assert not process_gone(-(2**22) - 1), "a group of processes that does not exist"
    assert not process_gone(1 << 70)
    assert not process_gone(1), "a process of another user"


def test_processes_that_see_each_other_are_on_the_same_machine() -> None:
    code = "from headrace.broker.membership.local_processes import machine_id; print(machine_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == machine_id()


def test_the_name_of_a_process_is_not_its_state(tmp_path: Path) -> None:
    program = tmp_path / "a) Z x"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    child = subprocess.Popen([program, "60"])
    try:
        assert not process_gone(child.pid)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("stat", [b"", b"1 (x)", OSError()])
def test_a_process_whose_state_cannot_be_read_is_not_gone(stat: bytes | OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_path: Path) -> bytes:
        if isinstance(stat, OSError):
            raise stat
        return stat

    monkeypatch.setattr(Path, "read_bytes", read)
    assert not process_gone(os.getpid())


def test_a_machine_is_known_by_its_boot_and_by_who_shares_its_process_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    boots = {"boot": "one\n"}
    monkeypatch.setattr(Path, "read_text", lambda _path, **_: boots["boot"])
    monkeypatch.setattr(os, "readlink", lambda _path: "pid:[1]")
    here = machine_id()
    boots["boot"] = "two\n"
    assert machine_id() != here
    boots["boot"] = "one\n"
    assert machine_id() == here
    monkeypatch.setattr(os, "readlink", lambda _path: "pid:[2]")
    assert machine_id() not in ("", here)


def test_a_machine_that_does_not_tell_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_path: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "readlink", missing)
    assert machine_id() == ""
