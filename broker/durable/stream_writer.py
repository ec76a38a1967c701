"""Appends entries to a job's stream one at a time, by compare-and-set on the last entry that the writer knows.

The publish of an entry may be refused, or its outcome may stay unknown. An unknown outcome is repeated with the same bytes
before anything else is written. After a refusal the last entry is read, and `after_refusal` decides what it means.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, NamedTuple

import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.durable import metrics
from headrace.broker.durable.errors import CarrierLost, StreamIncomplete
from headrace.broker.durable.fold import JobState
from headrace.broker.errors import WireError
from headrace.broker.messages import EntryKind, StreamEntry
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

RETRY_S = 0.2
LONGEST_RETRY_S = 2.0
PUBLISH_TIMEOUT_S = 2.0
MOST_ENTRIES = 1_000_000  # of one job that are read

Outcome = Literal["landed", "lost", "again"]


class LastEntry(NamedTuple):
    """The last entry of a subject: its sequence and its writer."""

    seq: int
    nonce: str
    n: int


def after_refusal(last: LastEntry | None, *, known_seq: int, nonce: str, n: int) -> Outcome:
    """Decide what became of entry `n` of delivery `nonce`, which named `known_seq` as the last one and was refused.

    `landed`: it is the last entry. `lost`: another writer's entry is behind the one that this writer knew. `again`: nothing
    newer was seen, because the read is old or the stream is full.
    """
    if last is not None and (last.nonce, last.n) == (nonce, n):
        return "landed"
    if last is not None and last.seq > known_seq:
        return "lost"
    return "again"


async def read_stream(messaging: Messaging, subjects: Subjects, tenant: str, token: str) -> JobState:
    """Read the entries of a job and fold them. With replicas the answer may be old. Raises StreamIncomplete, JetStreamError."""
    stored = await messaging.subject_messages(subjects.stream("RSP"), subjects.rsp(tenant, token), limit=MOST_ENTRIES)
    state = JobState()
    for message in stored:
        try:
            entry = decode(StreamEntry, message.data)
        except WireError as error:
            raise StreamIncomplete(f"entry {message.seq} of {message.subject} cannot be read: {error}") from None
        state.apply(message.seq, entry)
    return state


class DurableStreamWriter:
    """Writes the entries of one delivery of a job. One call of `append` at a time."""

    def __init__(self, messaging: Messaging, subjects: Subjects, tenant: str, token: str, *, nonce: str) -> None:
        self.nonce = nonce
        self.last_seq = 0  # of the last entry known on the subject
        self._messaging = messaging
        self._stream = subjects.stream("RSP")
        self._subject = subjects.rsp(tenant, token)
        self._n = 0
        self._unsettled: tuple[EntryKind, bytes] | None = None  # an entry whose outcome is not known

    def continue_from(self, state: JobState) -> None:
        """Write behind the entries that were read. Nothing may have been written yet."""
        self.last_seq = state.last_seq

    async def append(self, kind: EntryKind, **fields: Any) -> None:
        """Append an entry, and return once it is known to be stored. It tries until it is cancelled.

        Raises CarrierLost if another writer has gone on, after which nothing more can be appended, and PayloadTooLarge if the
        entry does not fit into a message.
        """
        await self.settle()
        data = encode(StreamEntry(nonce=self.nonce, n=self._n + 1, kind=kind, **fields))
        self._unsettled = (kind, data)
        await self.settle()

    async def settle(self) -> None:
        """Find out whether the last entry was stored, and store it if it was not. Raises as `append` does."""
        wait_s = RETRY_S
        while self._unsettled is not None:
            kind, data = self._unsettled
            try:
                stored = await self._messaging.publish(
                    self._subject, data, expect_last_subject_seq=self.last_seq, timeout_s=PUBLISH_TIMEOUT_S
                )
            except PayloadTooLarge:
                self._unsettled = None
                raise
            except JetStreamError as error:
                if not await self._settled_all_the_same(kind, error):
                    await asyncio.sleep(wait_s)
                    wait_s = min(wait_s * 2, LONGEST_RETRY_S)
            else:
                self._landed(kind, stored.seq)

    async def _settled_all_the_same(self, kind: EntryKind, error: JetStreamError) -> bool:
        """Read what a publish that failed has become of. A publish without an answer is repeated, so it counts as refused."""
        try:
            last = await self._last()
        except (JetStreamError, WireError) as unread:
            log.debug("entry.unknown", subject=self._subject, error=str(error), unread=str(unread))
            return False
        outcome = after_refusal(last, known_seq=self.last_seq, nonce=self.nonce, n=self._n + 1)
        if outcome == "landed" and last is not None:
            self._landed(kind, last.seq)
            return True
        if outcome == "lost" and last is not None:
            self._unsettled = None
            raise CarrierLost(f"delivery {last.nonce!r} has written entry {last.seq} of {self._subject}")
        await self.gave_up_lost(last.seq if last is not None else 0)
        log.debug("entry.retry", subject=self._subject, kind=kind, error=str(error))
        return False

    async def gave_up_lost(self, last_seq: int) -> bool:
        """Write behind the entry that was seen as the last one, if the known one is lost: the stream's files were damaged.

        Returns whether that is so. Readers then find that entries are missing; the answer goes on.
        """
        if not await self._stream_lost():
            return False
        log.error("entries.lost", subject=self._subject, known=self.last_seq)
        metrics.ENTRIES_LOST.inc()
        self.last_seq = last_seq
        return True

    async def _stream_lost(self) -> bool:
        """Ask the leader, whose answer is never old, whether it has the entry that this writer knows as the last one."""
        if not self.last_seq:
            return False
        try:
            known = await self._messaging.get_message(self._stream, self.last_seq)
        except JetStreamError:
            return False
        return known is None or known.subject != self._subject

    async def _last(self) -> LastEntry | None:
        found = await self._messaging.last_messages(self._stream, [self._subject])
        if not found:
            return None
        try:
            entry = decode(StreamEntry, found[0].data)
        except WireError as error:  # no writer of ours: it is another's entry, behind which nothing can be appended
            metrics.UNREADABLE_ENTRIES.inc()
            log.error("entry.malformed", subject=self._subject, seq=found[0].seq, error=str(error))
            return LastEntry(found[0].seq, "", 0)
        return LastEntry(found[0].seq, entry.nonce, entry.n)

    def _landed(self, kind: EntryKind, seq: int) -> None:
        self.last_seq = seq
        self._n += 1
        self._unsettled = None
        metrics.ENTRIES.labels(kind).inc()
