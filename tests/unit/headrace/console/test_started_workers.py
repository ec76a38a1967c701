"""The workers of a run file, of which those without a lease are starting."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.console.started_workers import started_workers


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
