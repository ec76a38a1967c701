"""Writers that store the answer they write. Beside a stream the whole answer is collected and stored before its end."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from headrace.broker.messages import Row
from headrace.frontend.errors import FrontendError
from headrace.frontend.writers.base import StreamWriter, WholeWriter


class KeepAnswer(Protocol):
    """Stores the JSON of an answer. Ends in bounded time and raises nothing."""

    def __call__(self, answer: bytes, /) -> Awaitable[None]: ...


class StoringWhole(WholeWriter):
    """Writes an answer as `inner` does, and stores it before it is sent."""

    unsettled = True

    def __init__(self, inner: WholeWriter, keep: KeepAnswer) -> None:
        self.open = inner.open
        self._inner = inner
        self._keep = keep
        self._body = b""

    def take(self, rows: list[Row]) -> None:
        self._inner.take(rows)
        self.open = self._inner.open

    async def settle(self) -> None:
        self._body = self._inner.body()
        await self._keep(self._body)

    def body(self) -> bytes:
        return self._body


class StoringStream(StreamWriter):
    """Writes a stream as `inner` does, and stores what `whole` makes of the same rows before the last events are sent."""

    unsettled = True

    def __init__(self, inner: StreamWriter, whole: WholeWriter, keep: KeepAnswer) -> None:
        self.open = inner.open
        self._inner = inner
        self._whole = whole
        self._keep = keep

    def events(self, rows: list[Row]) -> bytes:
        self._whole.take(rows)
        events = self._inner.events(rows)
        self.open = self._inner.open
        return events

    async def settle(self) -> None:
        await self._keep(self._whole.body())

    def closing(self) -> bytes:
        return self._inner.closing()

    def failure(self, error: FrontendError) -> bytes:
        return self._inner.failure(error)
