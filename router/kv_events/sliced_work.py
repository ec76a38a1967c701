"""Does long work in slices, so that the rest of the process gets its turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

SHARE_S = 0.01  # work at most this long before the rest of the process gets its turn

Work = Iterator[None]  # a large change to the index, of which each step applies one slice; exhaust it before the next message


async def run_sliced(work: Work) -> None:
    """Exhaust `work`, with a pause for other tasks after every `SHARE_S`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SHARE_S
    for _ in work:
        if loop.time() >= until:
            await asyncio.sleep(0)
            until = loop.time() + SHARE_S
