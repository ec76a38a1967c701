"""The events of one response, kept so that they can be read again from any number on, also while more are coming."""

from __future__ import annotations

import asyncio
import zlib

from headrace.frontend.errors import FrontendError

END = b"\n\n"  # of an event; inside of one JSON has no bare line end


class EventsGone(FrontendError, status=400, code="events_not_kept"):
    """They were too many to be kept."""


class EventLog:
    """Event n is the one with sequence number n. Over `max_bytes` all are dropped, for a log with a hole serves nobody."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._size = 0
        self._more = asyncio.Event()
        self.ended = False
        self.dropped = False

    def add(self, events: bytes) -> None:
        """Whole events, in order."""
        self._size += len(events)
        if self._size > self._max_bytes:
            self._events.clear()
            self.dropped = True
        if not self.dropped:
            self._events += [event + END for event in events.split(END) if event]
        self._tell()

    def end(self) -> None:
        """Nothing more comes."""
        self.ended = True
        self._tell()

    def _tell(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def since(self, number: int) -> bytes:
        """The events from this number on, at least one; nothing once the log has ended before. Raises EventsGone."""
        while not self.dropped and len(self._events) <= number and not self.ended:
            await self._more.wait()
        if self.dropped:
            raise EventsGone("the events of this response are not kept: they are too many")
        return b"".join(self._events[number:])

    def count(self) -> int:
        """How many events there are."""
        return len(self._events)

    def packed(self) -> bytes:
        """All of them, compressed; empty if they were dropped. Takes long for a long answer: call it in a thread."""
        return b"" if self.dropped else zlib.compress(b"".join(self._events), 3)


def unpacked(stored: bytes, max_bytes: int) -> EventLog:
    """The log that was stored, ended. Takes long for a long answer: call it in a thread."""
    log = EventLog(max_bytes)
    if stored:
        log.add(zlib.decompressobj().decompress(stored, max_bytes + 1))
    else:
        log.dropped = True
    log.ended = True
    return log
