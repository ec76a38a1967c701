"""What turns the rows of a request into bytes for its client: the two kinds every API has."""

from __future__ import annotations

from abc import ABC, abstractmethod

from headrace.broker.messages import Row
from headrace.frontend.errors import FrontendError


class StreamWriter(ABC):
    """Server-sent events. `open` counts the choices that have not ended."""

    open: int
    unsettled: bool = False  # `settle` is to be awaited between the last row and `closing`

    @abstractmethod
    def events(self, rows: list[Row]) -> bytes:
        """All events of these rows, in order; empty when there is nothing to say."""

    async def settle(self) -> None:
        """What must have happened before the answer is complete. Ends in bounded time and raises nothing."""
        return

    @abstractmethod
    def closing(self) -> bytes:
        """What follows the last row."""

    @abstractmethod
    def failure(self, error: FrontendError) -> bytes:
        """Ends a stream whose status was sent long ago; it must not look complete."""


class WholeWriter(ABC):
    """The answer in one piece. `open` counts the choices that have not ended."""

    open: int
    unsettled: bool = False  # `settle` is to be awaited between the last row and `body`

    @abstractmethod
    def take(self, rows: list[Row]) -> None: ...

    async def settle(self) -> None:
        """As that of a stream, but what it raises is the answer then."""
        return

    @abstractmethod
    def body(self) -> bytes:
        """The JSON of the whole answer; call it once `open` is 0."""
