"""A terminal that is redrawn in place: its other screen, no cursor, keys one by one; as before when it is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import termios
import tty
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """The terminal of this process. Keys are read where the standard input is a terminal, too."""

    def __init__(self) -> None:
        self._keys: asyncio.Queue[str] = asyncio.Queue(64)
        self._saved: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if self._saved is not None:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)

    @property
    def size(self) -> tuple[int, int]:
        """The present width and height."""
        size = shutil.get_terminal_size()
        return size.columns, size.lines

    def show(self, lines: Sequence[str]) -> None:
        """Replace what is shown, line by line, so that nothing flickers."""
        sys.stdout.write(_HOME + "\r\n".join(line + _END_OF_LINE for line in lines) + _BELOW)
        sys.stdout.flush()

    async def key(self, timeout_s: float) -> str | None:
        """Wait for a key, at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._keys.get()
        except TimeoutError:
            return None

    def _read(self) -> None:
        typed = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        if not typed:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            typed = "q"
        for key in typed:
            if not self._keys.full():
                self._keys.put_nowait(key)
