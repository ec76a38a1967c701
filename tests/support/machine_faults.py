"""Faults of a machine: a disk that is full, a nats-server's store that is damaged, a clock that jumps."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk_at(place: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes at a folder that is made. Raises PermissionError for who may not mount.

    A shell outside this process's group holds it, and unmounts it when its input ends: also if this process is killed.
    """
    place.mkdir()
    script = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && echo mounted && { read -r _; umount --lazy "$2"; }'
    shell = subprocess.Popen(
        ["sh", "-c", script, "sh", str(size), str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert shell.stdout is not None
    try:
        if not shell.stdout.readline():
            raise PermissionError(f"cannot mount a file system at {place}: {shell.communicate()[1].strip()}")
        yield place
    finally:
        shell.communicate()
    if shell.returncode:
        raise OSError(f"{place} was not unmounted")


def fill(file: Path) -> None:
    """Write into a file until its disk has no byte left."""
    with file.open("ab", buffering=0) as ballast:
        for piece in (65536, 1):
            try:
                while True:
                    ballast.write(bytes(piece))
            except OSError:
                continue


def truncate(store: Path) -> None:
    """Cut off the second half of every file, as a power cut may."""
    for file in _files(store):
        os.truncate(file, file.stat().st_size // 2)


def garble(store: Path) -> None:
    """Put other bytes into the middle of every file."""
    rng = random.Random(1)  # damage, not a secret
    for file in _files(store):
        data = bytearray(file.read_bytes())
        for at in range(len(data) // 3, 2 * len(data) // 3):
            data[at] = rng.randrange(256)
        file.write_bytes(data)


def garble_descriptions(store: Path) -> None:
    """Put other bytes in place of what nats-server reads first of each stream, so that it cannot read any of them."""
    for file in store.rglob("meta.inf"):
        file.write_bytes(b"?" * file.stat().st_size)


def delete(store: Path) -> None:
    """Remove the store."""
    shutil.rmtree(store)


def _files(store: Path) -> list[Path]:
    found = [file for file in store.rglob("*") if file.is_file() and file.stat().st_size]
    if not found:
        raise FileNotFoundError(f"there is no file with contents in {store}")
    return found


_MODULE = """

with open(os.environ["CHAOS_CLOCK"], "rb") as file:
    offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
real = time.time
time.time = lambda: real() + struct.unpack("d", offset[:8])[0]
"""


class Clock:
    """The time for all processes that are started with its `environment`."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made, and has to stay as long as the processes run."""
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_MODULE)
        self._file = folder / "offset"
        self._file.write_bytes(struct.pack("d", 0.0))
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths), "CHAOS_CLOCK": str(self._file)}

    def jump_to(self, offset_s: float) -> None:
        """Set the clock to so much before or after the true time."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("d", offset_s))
