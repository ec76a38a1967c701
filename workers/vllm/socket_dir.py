"""Manages the folder for the local sockets of a vLLM, and removes it with the engine: vLLM would leave four per start behind.

A killed worker leaves its folder, and the next worker to start removes it. A living worker holds a lock in its folder, which
also works between containers that share the directory, where process ids mean nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "headrace-vllm-"
BASE = "VLLM_RPC_BASE_PATH"
LONGEST = 107 - 37  # the kernel's limit for the path of a socket, less vLLM's name for one
_LOCK = "lock"


class SocketFolder:
    """A folder that the constructor creates and only this user can enter."""

    def __init__(self, place: Path | None = None) -> None:
        place = place or Path(tempfile.gettempdir())
        _remove_abandoned(place)
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(place / made.name.removeprefix("."))  # by this name it is always locked

    @contextmanager
    def given(self, environ: MutableMapping[str, str]) -> Iterator[None]:
        """Have vLLM create its sockets here while it starts, unless the operator set a place or the path is too long."""
        if BASE in environ or len(os.fsencode(self.path)) > LONGEST:
            yield
            return
        environ[BASE] = str(self.path)
        try:
            yield
        finally:
            environ.pop(BASE, None)

    def remove(self) -> None:
        """Remove the folder. Does nothing if it is gone."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's; or another process removes it too, or it is in use
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
