"""Does the same for many items, so many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int) -> None:
    """Await `work` for each item. The first exception cancels the others, and is raised as it is, not in a group."""
    left = iter(items)

    async def some() -> None:
        for item in left:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(some())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
