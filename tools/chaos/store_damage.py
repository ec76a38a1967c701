"""Damages the store of a nats-server that is not running: cuts or garbles its files, or removes all of it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path


def truncate(store: Path) -> None:
    """Cut off the second half of every file, as a power cut may."""
    for file in _files(store):
        os.truncate(file, file.stat().st_size // 2)


def garble(store: Path) -> None:
    """Put other bytes into the middle of every file."""
    rng = random.Random(1)  # noqa: S311  # damage, not a secret
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
