"""The run file, as other commands read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.errors import StartFailed
from headrace.up.runfile import RunFile, read_run_file

STATE = {"pid": 1, "prefix": "hr", "namespace": "default", "nats": {"url": "nats://127.0.0.1:4711", "context": None}}


def test_what_is_written_can_be_read_while_it_is_open(tmp_path: Path) -> None:
    with RunFile(tmp_path) as file:
        assert read_run_file(tmp_path) is None
        file.write({**STATE, "pid": os.getpid()})
        running = read_run_file(tmp_path)
        assert running is not None
        assert (running.nats_url, running.prefix, running.alive) == ("nats://127.0.0.1:4711", "hr", True)
    assert read_run_file(tmp_path) is None


def test_a_file_that_was_left_behind_names_a_process_that_is_gone(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text(json.dumps({**STATE, "pid": ended.pid}))
    running = read_run_file(tmp_path)
    assert running is not None
    assert not running.alive


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pid": 1}', '{"pid": "x", "nats": {"url": null}}'])
def test_a_file_that_is_no_run_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text(content)
    with pytest.raises(StartFailed, match=r"run/up\.json is no run file"):
        read_run_file(tmp_path)


def test_a_data_folder_that_is_a_file_has_no_run_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    assert read_run_file(tmp_path / "data") is None


@pytest.mark.parametrize(
    ("urls", "same"),
    [
        (["nats://127.0.0.1:4711"], True),
        (["localhost:4711"], True),
        (["tls://127.0.0.1:4711"], True),
        (["nats://127.0.0.1:4712"], False),
        (["nats://127.0.0.1"], False),
        (["nats://127.0.0.1:x"], False),
        (["nats://broker:4711"], False),
        (["nats://127.0.0.1:4711", "nats://broker:4222"], False),
        ([], False),
    ],
)
def test_an_address_is_that_of_the_running_server_by_host_and_port(tmp_path: Path, urls: list[str], same: bool) -> None:
    with RunFile(tmp_path) as file:
        file.write(STATE)
        running = read_run_file(tmp_path)
    assert running is not None
    assert running.serves(urls) is same


def test_a_login_is_one_of_the_folder_that_the_running_server_asks_for(tmp_path: Path) -> None:
    logins = tmp_path / "nats" / "logins"
    logins.mkdir(parents=True)
    (logins / "router.json").write_text("{}")
    found = {}
    with RunFile(tmp_path) as file:
        for context in (str(logins / "operator.json"), "prod", None):
            file.write({**STATE, "nats": {"url": "nats://127.0.0.1:4711", "context": context}})
            running = read_run_file(tmp_path)
            assert running is not None
            found[context] = running.login(["worker-m", "router"])
            assert running.login(["worker-m"]) is None
    assert found == {str(logins / "operator.json"): str(logins / "router.json"), "prod": None, None: None}
