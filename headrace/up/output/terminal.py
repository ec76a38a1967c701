"""Writes the terminal of `headrace up`: log lines of all parts with a short prefix, and one live status line under them.

The supervisor's own log writes to it, too, so that a log line never lands in the middle of the status line.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from typing import ClassVar, TextIO

from headrace.base.logs import LogThread

_COLOURS = (36, 35, 32, 33, 34, 96, 95, 92)  # ANSI, one per part in the order of first appearance
_CLEAR = "\r\x1b[2K"
_MOST_PARTS = 4  # in a live line


class Terminal(io.TextIOBase):
    """Text stream that writes to `stream`. In JSON format lines of parts pass unchanged, and what is no JSON is wrapped."""

    STATUS_EVERY_S: ClassVar[float] = 1.0
    QUIET_START_S: ClassVar[float] = 2.0  # starts faster than this show no progress

    def __init__(self, stream: TextIO, *, json_lines: bool, colour: bool) -> None:
        super().__init__()
        self._stream = stream
        self._json = json_lines
        self._colour = colour
        self._live = stream.isatty() and not json_lines
        self._status = ""
        self._prefixes: dict[str, str] = {}

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        if self._status:
            self._stream.write(_CLEAR)
        self._stream.write(text)
        if self._status and text.endswith("\n"):
            self._stream.write(self._status)
        self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Write what waits: what the command prints next comes after it."""
        super().close()
        if isinstance(self._stream, LogThread):
            self._stream.close()

    def part_lines(self, part: str, lines: Sequence[str]) -> None:
        """Write lines of a part's output together."""
        if self._json:
            texts = [as_json(part, line) for line in lines]
        else:
            prefix = self._prefix(part)
            texts = [prefix + line for line in lines]
        self.write("\n".join(texts) + "\n")

    def status(self, text: str) -> None:
        """Replace the live line; empty removes it. Does nothing where there is no terminal."""
        if self._live and (text or self._status):
            self._stream.write(_CLEAR + text)
            self._stream.flush()
            self._status = text

    def waiting(self, what: str, elapsed_s: float) -> None:
        """Show what a start waits for, as the live line."""
        self.status(f"  … {what}, {elapsed_s:.0f} s")

    def finishing(self, parts: Sequence[str], elapsed_s: float) -> None:
        """Show which parts have not ended yet, as the live line."""
        self.status(stopping_text(parts, elapsed_s))

    async def settle(self, parts: Iterable[str], *, one_of: Iterable[str], timeout_s: float) -> None:
        """Wait for nothing: where all log lines are shown, those of parts that become ready may come at any time."""

    def _prefix(self, part: str) -> str:
        prefix = self._prefixes.get(part)
        if prefix is None:
            prefix = f"{part:<9}│ "
            if self._colour:
                prefix = f"\x1b[{_COLOURS[len(self._prefixes) % len(_COLOURS)]}m{prefix}\x1b[0m"
            self._prefixes[part] = prefix
        return prefix


def stopping_text(parts: Sequence[str], elapsed_s: float) -> str:
    """Return the live line while parts finish their work, empty when all have ended."""
    if not parts:
        return ""
    shown = ", ".join(parts[:_MOST_PARTS]) + (f" and {len(parts) - _MOST_PARTS} more" if len(parts) > _MOST_PARTS else "")
    return f"  … {shown} {'finishes' if len(parts) == 1 else 'finish'}, {elapsed_s:.0f} s"


def as_json(part: str, line: str) -> str:
    """Return a part's line as it is if it is JSON, else wrapped."""
    return line if line.startswith("{") else json.dumps({"event": "part.output", "component": part, "line": line})
