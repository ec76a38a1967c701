"""Mounts a small file system, and fills it to the last byte."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk_at(place: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes at a folder that is made. Raises PermissionError for who may not mount."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mount = subprocess.run(command, capture_output=True, text=True, check=False)
    if mount.returncode:
        raise PermissionError(f"cannot mount a file system at {place}: {mount.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(file: Path) -> None:
    """Write into a file until its disk has no byte left."""
    with file.open("ab", buffering=0) as ballast:
        for piece in (65536, 1):
            try:
                while True:
                    ballast.write(bytes(piece))
            except OSError:
                continue
