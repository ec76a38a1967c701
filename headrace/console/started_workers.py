"""Reads which workers the `headrace up` of this machine has started: those without a lease are still starting."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.console.overview_rows import StartingWorker
from headrace.up.runfile import run_file_of


def started_workers(data_dir: Path | None) -> list[StartingWorker]:
    """Return the workers that the run file of a data folder names; none without such a file, or for one of another version."""
    if data_dir is None:
        return []
    try:
        found = json.loads(run_file_of(data_dir).read_bytes())["workers"]
        return [StartingWorker(str(one["name"]), int(one["pid"]), _began(int(one["pid"]))) for one in found if one["pid"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _began(pid: int) -> int:
    """Return when a process began, 0 where that cannot be read."""
    try:
        return round(Path(f"/proc/{pid}").stat().st_ctime)
    except OSError:
        return 0
