"""Waits for the answers to many publishes at once, without a future, a timer and a wake-up for each of them."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class AckGroup(Generic[T]):
    """Answers that are waited for together. Give all parts out before the first answer can come, then await `all`."""

    def __init__(self) -> None:
        self._open = 0
        self._all: asyncio.Future[None] | None = None

    def part(self) -> AckPart[T]:
        """Return a place for one more answer."""
        self._open += 1
        return AckPart(self)

    async def all(self) -> None:
        """Wait until every part has its outcome."""
        if self._open:
            self._all = asyncio.get_running_loop().create_future()
            await self._all

    def answered(self) -> None:
        """Note the outcome of one part."""
        self._open -= 1
        if not self._open and self._all is not None and not self._all.done():
            self._all.set_result(None)


class AckPart(Generic[T]):
    """The place of one answer, filled as a future is, but no task is woken for it alone."""

    __slots__ = ("_group", "outcome")

    def __init__(self, group: AckGroup[T]) -> None:
        self._group = group
        self.outcome: T | BaseException | None = None

    def done(self) -> bool:
        return self.outcome is not None

    def set_result(self, answer: T) -> None:
        self.outcome = answer
        self._group.answered()

    def set_exception(self, error: BaseException) -> None:
        self.outcome = error
        self._group.answered()
