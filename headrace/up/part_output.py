"""Reads the output of a part of `headrace up`: the lines of one read together, without a task that each of them wakes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

LONGEST_LINE = 1 << 20  # bytes; a longer line is dropped
TAIL_LINES = 20


class Lines:
    """Cuts bytes into lines. Empty ones are left out; of a progress bar the last state is kept."""

    def __init__(self, *, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = b""  # a line that has not ended
        self._too_long = False

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that end in these bytes."""
        end = data.rfind(b"\n")
        if end < 0:
            self._keep(self._rest + data)
            return []
        whole, rest = self._rest + data[:end], data[end + 1 :]
        if self._too_long:
            whole = whole.partition(b"\n")[2]
            self._too_long = False
        self._keep(rest)
        return _texts(whole)

    def end(self) -> list[str]:
        """Return the last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return _texts(rest)

    def _keep(self, rest: bytes) -> None:
        self._too_long = self._too_long or len(rest) > self._longest
        self._rest = b"" if self._too_long else rest


def _texts(whole: bytes) -> list[str]:
    text = whole.decode(errors="replace")
    lines = [line.rstrip() for line in text.split("\n")]
    if "\r" in text:
        lines = [line.rpartition("\r")[2] for line in lines]
    return [line for line in lines if line]


class PartOutput(asyncio.Protocol):
    """The reading end of a part's pipe. The lines of a read go to `on_lines`; the last ones are kept in `tail`."""

    def __init__(self, on_lines: Callable[[Sequence[str]], None]) -> None:
        """Make it in a running event loop."""
        self._lines = Lines()
        self._on_lines = on_lines
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ended = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._take(self._lines.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._take(self._lines.end())
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """Read no more."""
        if self._transport is not None:
            self._transport.close()

    def _take(self, lines: list[str]) -> None:
        if lines:
            self.tail.extend(lines[-TAIL_LINES:])
            self._on_lines(lines)
