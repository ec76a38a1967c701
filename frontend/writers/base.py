"""Base classes of the writers, which turn the rows of a request into bytes for its client."""

from __future__ import annotations

from abc import ABC, abstractmethod

from headrace.broker.messages import Row
from headrace.frontend.errors import FrontendError


class StreamWriter(ABC):
    """Writes an answer as server-sent events or lines. `open` counts the choices that have not ended."""

    open: int
    unsettled: bool = False  # `settle` is to be awaited between the last row and `closing`
    comments: bool = True  # comments may stand between the events, so that proxies do not give up

    @abstractmethod
    def events(self, rows: list[Row]) -> bytes:
        """Return the events of these rows, in order; empty if there are none."""

    async def settle(self) -> None:
        """Finish work that the answer must wait for, such as storing it. Ends in bounded time and raises nothing."""
        return

    @abstractmethod
    def closing(self) -> bytes:
        """Return the events after the last row."""

    @abstractmethod
    def failure(self, error: FrontendError) -> bytes:
        """Return the events that end a stream with an error, so that it does not look complete."""


class WholeWriter(ABC):
    """Writes an answer as a whole. `open` counts the choices that have not ended."""

    open: int
    unsettled: bool = False  # `settle` is to be awaited between the last row and `body`
    content_type: bytes = b"application/json"

    @abstractmethod
    def take(self, rows: list[Row]) -> None:
        """Add rows to the answer."""

    async def settle(self) -> None:
        """Finish work that the answer must wait for. An exception becomes the answer."""
        return

    @abstractmethod
    def body(self) -> bytes:
        """Return the answer, JSON unless `content_type` says otherwise. Call it once `open` is 0."""
