"""Writes the log of a process in a thread of its own: who logs never waits for what reads the log, and lines leave in batches.

A log goes into a pipe, a terminal or a file. Each of them can stand still: a pipe whose reader is frozen is full after 64 KiB,
and one more write would then stop the event loop, and with it every request.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TextIO

MOST_CHARS = 1 << 20  # that wait to be written; what comes on top of that is dropped
GATHER_S = 0.02  # lines that come within it are one write, and wake their reader once
END_S = 2.0  # for what waits at the end of the process


class LogThread(io.TextIOBase):
    """Text stream that takes everything at once. What it has no room for is dropped and counted, and told when it goes on.

    `stream` is written to by the thread alone, and must not raise. Without `start`, in a process that was forked and after
    `close` writes go to it directly.
    """

    def __init__(self, stream: TextIO, *, most_chars: int = MOST_CHARS, gather_s: float = GATHER_S) -> None:
        super().__init__()
        self._stream = stream
        self._most_chars = most_chars
        self._gather_s = gather_s
        self._lock = threading.RLock()  # a finaliser may log where a line is being added
        self._waiting: list[str] = []
        self._chars = 0
        self._lost = 0  # since it was told
        self._wake: SimpleQueue[bool] = SimpleQueue()  # False = the end
        self._thread: threading.Thread | None = None
        self.on_lost: Callable[[], None] = lambda: None
        """Is called for each write that is dropped."""

    def start(self) -> None:
        """Begin to write in a thread, until `close` or the end of the process."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        if self._thread is None:
            return self._stream.write(text)
        with self._lock:
            first = not self._waiting
            if self._chars + len(text) > self._most_chars:
                self._lost += 1
                self.on_lost()
                return len(text)
            self._waiting.append(text)
            self._chars += len(text)
        if first:
            self._wake.put(True)
        return len(text)

    def flush(self) -> None:
        """Do nothing: what was written leaves soon."""

    def close(self) -> None:
        """Write what waits, within `END_S`, and everything that comes later directly."""
        thread = self._thread
        if thread is None:
            return
        self._wake.put(False)
        thread.join(END_S)
        if not thread.is_alive():  # else it stands still, as a direct write would
            self._thread = None
            self._write_waiting()

    def _run(self) -> None:
        while self._wake.get():
            time.sleep(self._gather_s)
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        with self._lock:
            texts, self._waiting, self._chars = self._waiting, [], 0
            lost, self._lost = self._lost, 0
        if texts:
            self._stream.write("".join(texts))
        if lost:
            self._stream.write(json.dumps({"event": "log.lost", "level": "warning", "writes": lost}) + "\n")

    def _forked(self) -> None:
        """Leave what waits to the process that has the thread."""
        self._lock = threading.RLock()
        self._thread, self._waiting, self._chars, self._lost = None, [], 0, 0
