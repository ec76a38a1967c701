"""Appends entries to a job's stream one at a time, by compare-and-set on the last entry that the writer knows.

The publish of an entry may be refused, or its outcome may stay unknown. An unknown outcome is repeated with the same bytes
before anything else is written. After a refusal the last entry is read, and `after_refusal` decides what it means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.durable import metrics
from headrace.broker.durable.errors import CarrierLost, StreamIncomplete
from headrace.broker.durable.stored_job import StoredJob
from headrace.broker.errors import (
    DeadlineExceeded,
    JobCancelled,
    JobError,
    JobRefused,
    JobWithdrawn,
    PoisonJob,
    ResumeImpossible,
    SlowClient,
    WireError,
)
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.durable import EntryKind, JobStatus, StreamEntry
from headrace.broker.messages.frames import Finish, JobFault, Row
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

# Folds the entries of a job's stream into the state that they say: tokens, takers, crashes, and the end.
#
# Pure. A carrier resumes from that state, a reader checks what it passes on. Nothing that was not appended ever existed.


@dataclass(frozen=True, slots=True)
class Take:
    """The fence that a carrier set with delivery `nonce`."""

    nonce: str
    carrier: str


@dataclass(slots=True)
class JobState:
    """The state of a job as its entries say, in the order of their sequences.

    `last_seq`: sequence of the last entry on the subject, 0 = there is none; `writer` is its (nonce, n). `begun`: deliveries
    that got as far as `ok`, rows or an end. `events`: number of events so far, which is the number of the next one.
    """

    last_seq: int = 0
    writer: tuple[str, int] = ("", 0)
    takes: list[Take] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    emitted: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Finish] = field(default_factory=dict)
    entries: list[StreamEntry] = field(default_factory=list)  # those with rows or events, in order
    history: list[HistoryEntry] = field(default_factory=list)
    events: int = 0
    end: StreamEntry | None = None
    _written: dict[str, int] = field(default_factory=dict)  # entries of each delivery

    def apply(self, seq: int, entry: StreamEntry) -> None:
        """Apply the next entry. Raises StreamIncomplete if it is not contiguous."""
        if self.end is not None:
            raise StreamIncomplete(f"entry {seq} of {entry.nonce!r} follows the end of the stream")
        before = self._written.get(entry.nonce, 0)
        if entry.n != before + 1:
            raise StreamIncomplete(f"entry {seq} is number {entry.n} of delivery {entry.nonce!r}, after number {before}")
        if entry.events and entry.first_event != self.events:
            raise StreamIncomplete(f"entry {seq} begins with event {entry.first_event}, after {self.events} events")
        for row in entry.rows:
            self._row(seq, row)
        self._written[entry.nonce] = entry.n
        self.events += len(entry.events)
        if entry.rows or entry.events:
            self.entries.append(entry)
        if entry.kind == "take":
            self.takes.append(Take(entry.nonce, entry.carrier))
        elif entry.kind == "crash":
            self.history += [crash for crash in entry.history if crash not in self.history]
        else:
            self.begun.add(entry.nonce)
        if entry.kind == "end":
            self.end = entry
        self.last_seq, self.writer = seq, (entry.nonce, entry.n)

    def _row(self, seq: int, row: Row) -> None:
        have = self.emitted.setdefault(row.choice, [])
        if row.choice in self.finished or row.offset != len(have):
            raise StreamIncomplete(f"entry {seq} has tokens of choice {row.choice} from {row.offset} on, after {len(have)}")
        have += row.ids
        if row.fin is not None:
            self.finished[row.choice] = row.fin

    def emitted_of(self, choices: int) -> list[list[int]]:
        return [list(self.emitted.get(choice, ())) for choice in range(choices)]

    def finished_of(self, choices: int) -> list[Finish | None]:
        return [self.finished.get(choice) for choice in range(choices)]

    def unbegun(self) -> list[Take]:
        return [take for take in self.takes if take.nonce not in self.begun]


def fold(entries: Iterable[tuple[int, StreamEntry]]) -> JobState:
    state = JobState()
    for seq, entry in entries:
        state.apply(seq, entry)
    return state


log = structlog.get_logger()

RETRY_S = 0.2
LONGEST_RETRY_S = 2.0
PUBLISH_TIMEOUT_S = 2.0
MOST_ENTRIES = 1_000_000  # of one job that are read

Outcome = Literal["landed", "lost", "again"]


class LastEntry(NamedTuple):
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
        """Return whether a failed publish was stored. A publish without an answer is repeated, so it counts as refused."""
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


POISON_CARRIERS = 3  # carriers that died between their take and the submission of a job
LEAST_WINDOW = 8
JOBS_PER_SLOT = 2

Ended = JobStatus | Literal["retry"]


def has_entries(job: StoredJob, num_delivered: int) -> bool:
    """Return whether this delivery of a job writes entries: a plain job does so from its second delivery on."""
    return job.durable or num_delivered > 1


def asks_carriers(num_delivered: int, state: JobState) -> bool:
    """Return whether another carrier may have the job, so that all have to be asked."""
    return num_delivered > 1 or bool(state.takes)


def is_left_to(taker: bool | None, others: Collection[bool | None], *, taker_gone: bool) -> bool:
    """Decide whether a job is left to its carrier. Answers to `carrying?`: None = there was none.

    `taker`: that of the carrier that took the job last, False if there is no other one. `taker_gone`: a fresh read of its lease
    shows that it is gone. A carrier that took nothing and does not answer is not waited for: nothing says that it has the job.
    """
    return taker is True or any(answer is True for answer in others) or (taker is None and not taker_gone)


def is_carrier_poison(state: JobState, dead: Collection[str]) -> bool:
    """Decide whether a job ends its carriers. `dead`: carriers whose lease is gone and that announced no drain."""
    return len({take.carrier for take in state.unbegun() if take.carrier in dead}) >= POISON_CARRIERS


def window(slots: int, carriers: int, most: int) -> int:
    """Return the number of jobs of a model that one of these carriers may hold: what the pool's slots can use soon."""
    if slots <= 0:
        return 0
    return min(most, max(LEAST_WINDOW, JOBS_PER_SLOT * slots // max(1, carriers)))


def end_of(error: JobError, *, emitted: bool) -> Ended:
    """Return the status with which a job ends whose run ended in this error, or `retry`. `emitted`: clients have tokens.

    What the pool refuses for the moment is tried again: the job has until its deadline.
    """
    if isinstance(error, JobRefused | SlowClient | JobCancelled):
        return "retry"
    if isinstance(error, ResumeImpossible) and not emitted:
        return "retry"
    if isinstance(error, DeadlineExceeded):
        return "expired"
    if isinstance(error, JobWithdrawn):
        return "cancelled"
    return "poison" if isinstance(error, PoisonJob) else "failed"


def fault_of(error: JobError) -> JobFault:
    code = error.reason if isinstance(error, JobRefused) else error.code
    param: str | None = getattr(error, "param", None)
    return JobFault(code, str(error), retriable=error.retriable, param=param)
