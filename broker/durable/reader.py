"""Reads the events of a job's durable stream from any number on: replays those that are stored, then follows.

Readers need no carrier: they see what was appended by any writer. Event numbers count inside the job; an entry may hold
several events, and a reader may begin in the middle of one.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from headrace.broker.codec import decode
from headrace.broker.durable.errors import StreamIncomplete
from headrace.broker.durable.results import decode_result
from headrace.broker.errors import WireError
from headrace.broker.messages.durable import JobResult, StreamEntry
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


class EventFollow:
    """Reads the events of one job, for one reader. Close it."""

    def __init__(self, messaging: Messaging, stream: str, subject: str, *, first: int) -> None:
        self._messaging = messaging
        self._stream = stream
        self._subject = subject
        self._join = EventJoin(first)
        self._read: deque[Stretch] = deque()
        self._follow: Follow | None = None

    async def next(self) -> Stretch:
        """Wait for more events, or the end. May be cancelled and called again. Raises StreamIncomplete, JetStreamError."""
        while not self._read:
            if self._follow is None:
                self._follow = await follow_all(self._messaging, self._stream, self._subject)
            try:
                batch = await self._follow.next()
            except StreamTrimmed:  # entries of other jobs have expired; if some of this one have, the next ones do not join
                await self.close()
                continue
            for message in batch.messages:
                try:
                    entry = decode(StreamEntry, message.data)
                except WireError as error:
                    raise StreamIncomplete(f"entry {message.seq} of {self._subject} cannot be read: {error}") from None
                stretch = self._join.take(message.seq, entry)
                if stretch is not None:
                    self._read.append(stretch)
        return self._read.popleft()

    async def close(self) -> None:
        follow, self._follow = self._follow, None
        if follow is not None:
            await follow.close()


async def follow_all(messaging: Messaging, stream: str, subject: str) -> Follow:
    """Follow a subject from the first message that is stored. Raises JetStreamError."""
    state = await messaging.stream_state(stream)
    return messaging.follow(stream, subject, start_seq=state.first_seq)


class JobReader:
    """Reads durable streams and results of jobs for those who wait for them. It sets no deadline: its callers do."""

    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._messaging = messaging
        self._subjects = subjects

    def events(self, tenant: str, token: str, *, first: int = 0) -> EventFollow:
        stream, subject = self._subjects.stream("RSP"), self._subjects.rsp(tenant, token)
        return EventFollow(self._messaging, stream, subject, first=first)

    async def result(self, tenant: str, token: str) -> JobResult:
        """Wait for the result of a job. Raises JetStreamError."""
        stream, subject = self._subjects.stream("RESULT"), self._subjects.result(tenant, token)
        while True:
            follow = await follow_all(self._messaging, stream, subject)
            try:
                while True:
                    for message in (await follow.next()).messages:
                        return decode_result(message.data)
            except StreamTrimmed:  # results of other jobs have expired
                continue
            finally:
                await follow.close()

    async def begun(self, tenant: str, token: str) -> bool:
        """Return whether entries of a job are seen. Raises JetStreamError."""
        return bool(await self._messaging.last_messages(self._subjects.stream("RSP"), [self._subjects.rsp(tenant, token)]))
