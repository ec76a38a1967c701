"""Waits of tests with a real server."""

import asyncio


async def until(condition: object, timeout_s: float = 3.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)
