"""Progress and waits of a command: a changing line on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from headrace.base.errors import HeadraceError

EVERY_S = 10.0  # between two lines


class Progress:
    """The progress over `total` things. Lines come only when something was done, and never more often than `every_s`."""

    def __init__(
        self,
        total: int,
        unit: str,
        *,
        stream: IO[str] | None = None,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._unit = unit
        self._stream = stream if stream is not None else sys.stderr
        self._every_s = every_s
        self._clock = clock
        self._done = 0
        self._began_s = self._said_s = clock()
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=f" {unit}", file=self._stream, leave=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, number: int = 1, **told: object) -> None:
        """Count so many more. `told` is shown beside it."""
        self._done += number
        if self._bar is not None:
            if told:
                self._bar.set_postfix(refresh=False, **told)
            self._bar.update(number)
            return
        now_s = self._clock()
        if now_s - self._said_s < self._every_s or self._done >= self._total:
            return
        self._said_s = now_s
        more = "".join(f", {name} {value}" for name, value in told.items())
        share, took_s = self._done / self._total, now_s - self._began_s
        self._stream.write(f"{self._done:,} of {self._total:,} {self._unit} ({share:.0%}) after {took_s:.0f} s{more}\n")
        self._stream.flush()


T = TypeVar("T")
Look = Callable[[], Awaitable[str]]

TERMINAL_EVERY_S = 1.0
_CLEAR = "\r\x1b[K"


async def told_while(
    work: Awaitable[T], what: str, look: Look | None = None, *, stream: IO[str] | None = None, every_s: float | None = None
) -> T:
    """Return the result of `work`, and say meanwhile that `what` goes on; work that is soon over says nothing.

    `look` finds out how far it is, in a few words; while that fails, only the time is said.
    """
    out = stream if stream is not None else sys.stderr
    terminal = out.isatty()
    telling = asyncio.get_running_loop().create_task(
        _tell(out, what, look, terminal=terminal, every_s=every_s or (TERMINAL_EVERY_S if terminal else EVERY_S))
    )
    try:
        return await work
    finally:
        telling.cancel()
        await asyncio.wait([telling])
        if terminal:
            out.write(_CLEAR)
            out.flush()


async def _tell(out: IO[str], what: str, look: Look | None, *, terminal: bool, every_s: float) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        await asyncio.sleep(every_s)
        found = ""
        if look is not None:
            with contextlib.suppress(HeadraceError):
                found = await look()
        line = f"{what} … {loop.time() - began_s:.0f} s{f', {found}' if found else ''}"
        out.write(f"{_CLEAR}{line}" if terminal else f"{line}\n")
        out.flush()


KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def size(count: int) -> str:
    """Return a number of bytes with a binary unit: `512 B`, `1.5 MiB`; a negative one is `no limit`."""
    if count < 0:
        return "no limit"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
