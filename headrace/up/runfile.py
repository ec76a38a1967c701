"""Writes and reads `<data-dir>/run/up.json`, which tells commands, tools and tests what `headrace up` runs and where, and locks
the data folder against a second `up`.

    {"pid": 1, "ready": true, "url": "http://127.0.0.1:8000", "prefix": "hr", "namespace": "default",
     "nats": {"url": "nats://127.0.0.1:4222", "pid": 2, "context": null},
     "frontend": {"name": "frontend", "pid": 3, "port": 8000},
     "frontends": [{"name": "frontend", "pid": 3, "port": 8000}],
     "workers": [{"name": "worker-1", "role": "aggregated", "pid": 4, "metrics_port": 9100}],
     "routers": [{"name": "router-1", "pid": 5}],
     "console": {"name": "console", "pid": 6, "url": "http://127.0.0.1:8001/console"}}

`frontend` is the first of the frontends; of several each has a `metrics_port` of its own. The console is null where there is
none, a pid while its part is being restarted. The file is replaced in one step and removed at the end; one that stays is of an
`up` that was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from headrace.base.errors import AlreadyRunning, StartFailed
from headrace.base.process import make_private_folder

LOGINS = Path("nats", "logins")  # in the data folder
ONE_LOGIN = "deployment"  # where there are no roles
_PORT = 4222  # of an address without one


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDeployment:
    """The `headrace up` that a run file names: how to reach its NATS server, and the names it uses there."""

    path: Path
    pid: int
    nats_url: str | None
    nats_context: str | None
    prefix: str
    namespace: str
    url: str | None = None  # of the frontend

    def serves(self, urls: Collection[str]) -> bool:
        """Return whether these are addresses of its NATS server alone."""
        own = {_address(url) for url in (self.nats_url or "").split(",")}
        return bool(urls) and all(_address(url) in own for url in urls)

    def login(self, names: Iterable[str]) -> str | None:
        """Return the context of the first of these logins that its own NATS server has, or of its only one, if any."""
        folder = self.path.parents[1] / LOGINS
        if self.nats_context is None or Path(self.nats_context).parent != folder:
            return None  # a context of the operator's, for a server of theirs
        if Path(self.nats_context).stem == ONE_LOGIN:
            return self.nats_context  # files of roles may be there too, of an earlier start
        found = (folder / f"{name}.json" for name in names)
        return next((str(path) for path in found if path.is_file()), None)

    @property
    def alive(self) -> bool:
        """Return False when its process has ended and left the file behind."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    host = parts.hostname or ""
    return ("127.0.0.1" if host == "localhost" else host), (_PORT if port is None else port)


def run_file_of(data_dir: Path) -> Path:
    return data_dir / "run" / "up.json"


def read_run_file(data_dir: Path) -> RunningDeployment | None:
    """Return what runs with this data folder, None without a run file. Raises StartFailed for a file that cannot be read."""
    path = run_file_of(data_dir)
    try:
        found = json.loads(path.read_bytes())
        return RunningDeployment(
            path=path,
            pid=int(found["pid"]),
            nats_url=found["nats"]["url"],
            nats_context=found["nats"].get("context"),
            prefix=str(found["prefix"]),
            namespace=str(found["namespace"]),
            url=found.get("url"),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StartFailed(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StartFailed(f"{path} is no run file of this version of `headrace up` ({type(error).__name__}: {error})") from None


class RunFile:
    """The run file and the lock of a data folder, held while open. Raises AlreadyRunning or StartFailed when opened."""

    def __init__(self, data_dir: Path) -> None:
        self.path = run_file_of(data_dir)
        self._folder = self.path.parent
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            make_private_folder(self._folder.parent)
            make_private_folder(self._folder)
            lock = os.open(self._folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        self.path.unlink(missing_ok=True)  # of an `up` that was killed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, content: dict[str, Any]) -> None:
        make_private_folder(self._folder)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        fresh.replace(self.path)

    def _owner(self) -> str:
        try:
            return f" (pid {json.loads(self.path.read_text())['pid']})"
        except (OSError, ValueError, KeyError):
            return ""
