"""Gives all Headrace processes of a deployment a clock that jumps when it is told to. The nats-server keeps its own.

A module that Python imports at its start puts that clock in place of `time.time`.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

_MODULE = """
import mmap, os, struct, time

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
