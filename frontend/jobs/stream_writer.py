"""Writes the errors of a connection that reads a durable stream. They have no id: the stream itself goes on."""

from __future__ import annotations

from headrace.broker.messages import Row
from headrace.frontend.errors import FrontendError
from headrace.frontend.writers.base import StreamWriter


class ConnectionEvents(StreamWriter):
    """Stands for the writer of a stream whose events are written elsewhere."""

    open = 0

    def events(self, rows: list[Row]) -> bytes:
        return b""

    def closing(self) -> bytes:
        return b""

    def failure(self, error: FrontendError) -> bytes:
        """Return the event that tells why this connection ends."""
        return b"data: " + error.body() + b"\n\n"
