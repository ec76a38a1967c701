"""Reads which workers the `headrace up` of this machine has started: those without a lease are still starting."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from headrace.console.overview_rows import StartingWorker
from headrace.up.runfile import run_file_of

ANSWER_S = 0.5
MOST_BYTES = 65_536


def started_workers(data_dir: Path | None) -> list[StartingWorker]:
    """Return the workers that the run file of a data folder names; none without such a file, or for one of another version."""
    if data_dir is None:
        return []
    try:
        found = json.loads(run_file_of(data_dir).read_bytes())["workers"]
        return [
            StartingWorker(str(one["name"]), int(one["pid"]), _began(int(one["pid"])), int(one.get("metrics_port") or 0))
            for one in found
            if one["pid"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def start_of(worker: StartingWorker) -> StartingWorker:
    """Return a worker with what its start is at, as far as it tells that within a moment."""
    if not worker.port:
        return worker
    try:
        try:
            answer = urllib.request.urlopen(f"http://127.0.0.1:{worker.port}/ready", timeout=ANSWER_S)
        except urllib.error.HTTPError as not_ready:
            answer = not_ready
        with answer:
            return worker._replace(doing=str(json.loads(answer.read(MOST_BYTES))["reason"] or ""))
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return worker


def _began(pid: int) -> int:
    """Return when a process began, 0 where that cannot be read."""
    try:
        return round(Path(f"/proc/{pid}").stat().st_ctime)
    except OSError:
        return 0
