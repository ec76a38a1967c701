"""Runs blocking work in a thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], *, name: str) -> T:
    """Run `work` in a daemon thread, so that neither a cancelled caller nor the end of the process waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    result: list[T] = []

    def settle(error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result[0])

    def body() -> None:
        failure = None
        try:
            result.append(work())
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, failure)
        except RuntimeError:  # The loop is closed, so no caller waits for the result.
            return

    threading.Thread(target=body, name=name, daemon=True).start()
    return await future
