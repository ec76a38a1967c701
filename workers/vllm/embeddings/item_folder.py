"""The folder through which a worker and the core of its vLLM pass embeddings: one file per item, there while it is needed.

The worker of a serving engine puts a file there before vLLM gets the request, and removes it when no request needs it; the core
reads it when it would run the encoder. In an encode worker it is the core that writes and the worker that takes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


class ItemFolder:
    """The core's view of the folder. Names that no item has been given are absent, whatever they are."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes | None:
        """Return the record of an item, or None if it is not there."""
        if not _NAME.fullmatch(name):
            return None
        try:
            return (self.path / name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, record: bytes) -> None:
        """Write the record of an item, whole or not at all. Raises OSError."""
        if not _NAME.fullmatch(name):
            raise OSError(f"{name!r} is no name of an item")
        part = self.path / f".{name}.{os.getpid()}"
        part.write_bytes(record)
        part.replace(self.path / name)

    def remove(self, name: str) -> None:
        """Remove an item; an absent one is fine."""
        if _NAME.fullmatch(name):
            (self.path / name).unlink(missing_ok=True)


class LentItems:
    """The worker's side of the folder: which sequence needs which files. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        self.folder = ItemFolder(path)
        self._of: dict[str, list[str]] = {}
        self._users: Counter[str] = Counter()

    def lend(self, sequence_id: str, records: Mapping[str, bytes]) -> None:
        """Put the records of items there, by name, until the sequence has ended. Raises OSError; then none of them is lent."""
        written = []
        try:
            for name, record in records.items():
                if not self._users[name]:
                    self.folder.write(name, record)
                written.append(name)
                self._users[name] += 1
        except OSError:
            self._of[sequence_id] = written
            self.end(sequence_id)
            raise
        self._of[sequence_id] = written

    def end(self, sequence_id: str) -> None:
        """Remove what no other sequence needs. Does nothing for a sequence without items."""
        for name in self._of.pop(sequence_id, ()):
            self._users[name] -= 1
            if self._users[name] <= 0:
                del self._users[name]
                self.folder.remove(name)

    def take(self, name: str) -> bytes | None:
        """Return what the core has written under this name, and remove it; None if it has not."""
        record = self.folder.read(name)
        self.folder.remove(name)
        return record
