"""Reads the events of a job's durable stream from any number on: replays those that are stored, then follows.

Readers need no carrier: they see what was appended, whoever did so. Event numbers count inside the job; an entry may hold
several events, and a reader may begin in the middle of one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from headrace.broker.codec import decode
from headrace.broker.durable.errors import StreamIncomplete
from headrace.broker.durable.result_store import decode_result
from headrace.broker.messages import JobResult, StreamEntry
from headrace.jetstream.errors import StreamTrimmed
from headrace.jetstream.ports import Follow, Messaging
from headrace.jetstream.subjects import Subjects


class Stretch(NamedTuple):
    """Events of one entry. `first` is the number of the first of them; `end` is the entry that ends the stream."""

    first: int
    events: list[bytes]
    end: StreamEntry | None = None


class EventJoin:
    """Joins the events of entries, from event `wanted` on. Pure."""

    def __init__(self, wanted: int = 0) -> None:
        self.wanted = wanted  # the next event to hand out
        self._known = 0  # events in the entries so far
        self._written: dict[str, int] = {}  # entries of each delivery
        self._seq = 0

    def take(self, seq: int, entry: StreamEntry) -> Stretch | None:
        """Take the next entry; one that was taken before is passed over. Returns what is new in it.

        Raises StreamIncomplete if entries or events before it are missing.
        """
        if seq <= self._seq:
            return None
        before = self._written.get(entry.nonce, 0)
        if entry.n != before + 1:
            raise StreamIncomplete(f"the stream has entry {entry.n} of delivery {entry.nonce!r} behind its entry {before}")
        if entry.events and entry.first_event != self._known:
            raise StreamIncomplete(f"the stream continues with event {entry.first_event}, after {self._known} events")
        self._seq = seq
        self._written[entry.nonce] = entry.n
        first = max(self._known, self.wanted)
        fresh = entry.events[first - self._known :]
        self._known += len(entry.events)
        self.wanted = max(self.wanted, self._known)
        end = entry if entry.kind == "end" else None
        return Stretch(first, fresh, end) if fresh or end is not None else None


class JobReader:
    """Reads durable streams and results of jobs for those who wait for them. It sets no deadline: its callers do."""

    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._messaging = messaging
        self._subjects = subjects

    async def events(self, tenant: str, token: str, *, first: int = 0) -> AsyncIterator[Stretch]:
        """Yield the events of a job from number `first` on, up to its end. Raises StreamIncomplete, JetStreamError."""
        join = EventJoin(first)
        stream, subject = self._subjects.stream("RSP"), self._subjects.rsp(tenant, token)
        while True:
            try:
                async with self._following(stream, subject) as follow:
                    while True:
                        for message in (await follow.next()).messages:
                            stretch = join.take(message.seq, decode(StreamEntry, message.data))
                            if stretch is not None:
                                yield stretch
                                if stretch.end is not None:
                                    return
            except StreamTrimmed:  # entries of other jobs expired meanwhile; if some of this one did, they do not join
                continue

    async def result(self, tenant: str, token: str) -> JobResult:
        """Wait for the result of a job. Raises JetStreamError."""
        stream, subject = self._subjects.stream("RESULT"), self._subjects.result(tenant, token)
        while True:
            try:
                async with self._following(stream, subject) as follow:
                    while True:
                        for message in (await follow.next()).messages:
                            return decode_result(message.data)
            except StreamTrimmed:
                continue

    @asynccontextmanager
    async def _following(self, stream: str, subject: str) -> AsyncIterator[Follow]:
        state = await self._messaging.stream_state(stream)
        follow = self._messaging.follow(stream, subject, start_seq=state.first_seq)
        try:
            yield follow
        finally:
            await follow.close()
