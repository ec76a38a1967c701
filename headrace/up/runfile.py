"""Writes `<data-dir>/run/up.json`, which tells tools and tests what `headrace up` runs and where, and locks the data folder
against a second `up`.

    {"pid": 1, "ready": true, "url": "http://127.0.0.1:8000",
     "nats": {"url": "nats://127.0.0.1:4222", "pid": 2},
     "frontend": {"name": "frontend", "pid": 3, "port": 8000},
     "workers": [{"name": "worker-1", "role": "aggregated", "pid": 4}],
     "routers": [{"name": "router-1", "pid": 5}]}

A pid is null while its part is being restarted. The file is replaced in one step and removed at the end.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.errors import AlreadyRunning, StartFailed


class RunFile:
    """The run file and the lock of a data folder, held while open. Raises AlreadyRunning or StartFailed when opened."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "run"
        self.path = self._folder / "up.json"
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StartFailed(f"cannot use the data folder {self._folder.parent}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise AlreadyRunning(
                f"another `headrace up` uses the data folder {self._folder.parent}{self._owner()}; "
                "stop it or choose another --data-dir"
            ) from None
        self._lock = lock
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, content: dict[str, Any]) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        fresh.replace(self.path)

    def _owner(self) -> str:
        try:
            return f" (pid {json.loads(self.path.read_text())['pid']})"
        except (OSError, ValueError, KeyError):
            return ""
