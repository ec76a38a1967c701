"""Says what a command waits for, and for how long by now: one changing line on a terminal, else a line from time to time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from typing import IO, TypeVar

from headrace.base.errors import HeadraceError
from headrace.commands.progress import EVERY_S

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
