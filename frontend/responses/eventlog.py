"""A log of the events of one response, which can be read from any number on, also while events are added."""

from __future__ import annotations

import asyncio
import zlib

from headrace.frontend.errors import FrontendError

END = b"\n\n"  # of an event; JSON inside an event has no bare line end


class EventsGone(FrontendError, status=400, code="events_not_kept"):
    """The response has too many events to keep."""


class EventLog:
    """A log in which event n has sequence number n. Over `max_bytes` all events are dropped, as a log with a gap is useless."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._size = 0
        self._more = asyncio.Event()
        self.ended = False
        self.dropped = False

    def add(self, events: bytes) -> None:
        """Add whole events, in order."""
        self._size += len(events)
        if self._size > self._max_bytes:
            self._events.clear()
            self.dropped = True
        if not self.dropped:
            self._events += [event + END for event in events.split(END) if event]
        self._wake()

    def end(self) -> None:
        """Mark the log as complete."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def since(self, number: int) -> bytes:
        """Wait for the events from this number on; empty if the log has ended before it. Raises EventsGone."""
        while not self.dropped and len(self._events) <= number and not self.ended:
            await self._more.wait()
        if self.dropped:
            raise EventsGone("the events of this response are not kept: they are too many")
        return b"".join(self._events[number:])

    async def close(self) -> None:
        """Do nothing: a log has no reader of its own."""

    def count(self) -> int:
        """Return the number of events."""
        return len(self._events)

    def packed(self) -> bytes:
        """Return all events, compressed; empty if they were dropped. Takes long for a long answer: call it in a thread."""
        return b"" if self.dropped else zlib.compress(b"".join(self._events), 3)


def unpacked(stored: bytes, max_bytes: int) -> EventLog:
    """Return a stored log, ended. Takes long for a long answer: call it in a thread."""
    log = EventLog(max_bytes)
    if stored:
        log.add(zlib.decompressobj().decompress(stored, max_bytes + 1))
    else:
        log.dropped = True
    log.ended = True
    return log
