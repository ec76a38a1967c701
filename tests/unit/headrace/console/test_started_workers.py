"""The workers of a run file, of which those without a lease are starting."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from headrace.broker.part_state import PartState
from headrace.commands.probe_server import serve_probes
from headrace.console.overview_rows import StartingWorker
from headrace.console.started_workers import start_of, started_workers


def test_workers_of_the_run_file_are_named_with_their_beginning(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    workers = [{"name": "worker-1", "role": "aggregated", "pid": os.getpid()}, {"name": "worker-2", "pid": None}]
    (tmp_path / "run" / "up.json").write_text(json.dumps({"workers": workers}))
    (found,) = started_workers(tmp_path)
    assert (found.name, found.pid) == ("worker-1", os.getpid())
    assert found.since > 0


@pytest.mark.parametrize("text", ["", "[]", '{"workers": [{"name": "w"}]}', '{"workers": 3}'])
def test_a_file_that_cannot_be_read_names_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text(text)
    assert started_workers(tmp_path) == []
    assert started_workers(None) == started_workers(tmp_path / "absent") == []


def test_a_worker_tells_what_its_start_is_at_and_one_that_does_not_answer_nothing() -> None:
    state = PartState("worker")
    state.starts("the engine is being warmed up")
    worker = StartingWorker("w", 7, 1, serve_probes("127.0.0.1", 0, state))
    assert start_of(worker) == worker._replace(doing="the engine is being warmed up")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        silent = StartingWorker("w", 7, 1, closed.getsockname()[1])
        assert start_of(silent) == silent
    assert start_of(StartingWorker("w", 7, 1)).doing == ""
