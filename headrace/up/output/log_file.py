"""Keeps the log lines of all parts of `headrace up` in a file of bounded size, where the terminal shows only a few of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

MOST_BYTES = 8 << 20


class LogFile:
    """A log of at most twice `most_bytes`: a full file becomes `<name>.1`. Lines that cannot be written are counted."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self.lost = 0
        self.error = ""
        """Why the last line was lost, empty if none was."""
        self._most_bytes = most_bytes
        self._file: TextIO | None = None
        self._bytes = 0

    def write(self, *lines: str) -> bool:
        """Append lines. Returns False if they are lost; never raises for what the disk does."""
        text = "".join(f"{line}\n" for line in lines)
        try:
            if self._file is None:
                self._open()
            elif self._bytes >= self._most_bytes:
                self.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._open()
            assert self._file is not None  # noqa: S101  # just opened
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self.close()
            self.lost += len(lines)
            self.error = os.strerror(error.errno) if error.errno else str(error)
            return False
        self._bytes += len(text)
        return True

    def close(self) -> None:
        """Close the file. The next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.error = str(error)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8", errors="replace")
        self._bytes = self._file.tell()
