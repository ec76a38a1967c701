"""Reports how much of a download has arrived, by the size of the folder that another program writes it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_EVERY_S = 0.5
_STEP = 0.05  # of the whole, that must have arrived since the last report
_MB = 1e6


@contextmanager
def reported(
    folder: Path, progress: Callable[[str], None], *, what: str, total_mb: float, every_s: float = _EVERY_S
) -> Iterator[None]:
    """Call `progress` from a thread with one line per step, from what lies in `folder`, while the context is open."""
    over = threading.Event()

    def watch() -> None:
        told_mb = 0.0
        while not over.wait(every_s):
            arrived_mb = folder_bytes(folder) / _MB
            if told_mb + _STEP * total_mb <= arrived_mb <= total_mb:
                told_mb = arrived_mb
                progress(f"{what}, {arrived_mb:.0f} of {total_mb:.0f} MB …")

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextmanager
def growth_reported(folder: Path, tell: Callable[[float | None], None], *, step_mb: float, every_s: float) -> Iterator[None]:
    """Call `tell` from a thread with the MB in `folder` after each `step_mb` that it grew, and with None when it stops growing.

    For a download whose whole size is not known; the folder need not be there yet.
    """
    over = threading.Event()
    begun_mb = folder_bytes(folder) / _MB  # before the download begins

    def watch() -> None:
        told_mb = last_mb = begun_mb
        growing = False
        while not over.wait(every_s):
            now_mb = folder_bytes(folder) / _MB
            if now_mb >= told_mb + step_mb:
                told_mb, growing = now_mb, True
                tell(now_mb)
            elif growing and now_mb == last_mb:
                growing = False
                tell(None)
            last_mb = now_mb

    watcher = threading.Thread(target=watch, name="download-growth", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder. Those that vanish meanwhile do not count."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                size += path.stat().st_size
    return size
