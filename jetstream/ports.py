"""Declares what the rest of the project may ask of NATS, as protocols.

`headrace.jetstream.client.Connection` is the real thing.  Tests run the same protocol code over a simulated server that
implements
these protocols in virtual time, so nothing outside `jetstream/` may need more than what stands here.

Callbacks are synchronous, run on the event loop, and must not block: they put things into queues or state machines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import msgspec

from headrace.jetstream.errors import JetStreamError


class Message(msgspec.Struct, frozen=True):
    """A core NATS message as received. `reply` is empty when no answer is expected."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] | None = None


class PubAck(msgspec.Struct, frozen=True):
    """The server's word that a message is stored. `duplicate`: a message with this id was stored before."""

    stream: str
    seq: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it lies in a stream. `at`: Unix time when it was stored, 0 when the way of reading does not tell."""

    subject: str
    seq: int
    data: bytes
    headers: Mapping[str, str] | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamState:
    """Bounds of a stream. An empty stream has `first_seq` = `last_seq` + 1. `created` tells it from a later one of the same
    name. `last_of_subject`: the last message of the subject asked about, 0 when there is none; it was read after the others."""

    first_seq: int
    last_seq: int
    messages: int
    created: str
    last_of_subject: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that a follow has read, in order, possibly none. `position`: everything up to this sequence has been handed out.
    `pending`: messages that wait in the stream behind the last of these."""

    messages: Sequence[StoredMessage]
    position: int
    pending: int


@runtime_checkable
class Delivery(Protocol):
    """A stored message as it was delivered to this process. Acks are fire and forget and never raise while disconnected."""

    @property
    def subject(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def stream_seq(self) -> int: ...
    @property
    def num_delivered(self) -> int: ...
    @property
    def pending(self) -> int: ...
    def ack(self) -> None: ...
    def nak(self, delay_s: float = 0.0) -> None: ...
    def progress(self) -> None: ...
    def term(self, reason: str = "") -> None: ...


class PullLoop(Protocol):
    """A continuous pull on one consumer. Outstanding pull requests never exceed the credit."""

    async def run(self) -> None:
        """Pull until cancelled or stopped. Survives reconnects and server restarts."""

    def add_credit(self, n: int = 1) -> None:
        """Allow `n` more deliveries (negative: fewer). Each delivery uses one up."""

    @property
    def credit(self) -> int:
        """Deliveries still allowed."""

    async def stop(self) -> None:
        """End `run` and withdraw the open pull requests, so that nothing is delivered to a reader that has left."""


class Follow(Protocol):
    """Reads one subject (or pattern) of a stream in order, without a gap and without an ack. For one reader at a time."""

    @property
    def position(self) -> int:
        """Every message of the subject up to this sequence has been handed out."""

    async def next(self) -> Batch:
        """Wait until there is more. Survives reconnects and server restarts, and may be cancelled and called again.

        Raises StreamTrimmed when messages behind `position` were removed before they could be read.
        """

    async def close(self) -> None:
        """Leave nothing behind on the server."""


class Subscription(Protocol):
    """Interest in a subject. Callbacks may still run until `unsubscribe` returns."""

    async def unsubscribe(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a bucket with its value. `revision` is the stream sequence that compare-and-set refers to."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a key that a watch reports. `value` is None for `delete` and `expired`."""

    key: str
    value: bytes | None
    revision: int
    kind: Literal["put", "delete", "expired"] = "put"


class Bucket(Protocol):
    """A key-value bucket. A key that was deleted or has expired is absent, also while its marker is still stored."""

    async def get(self, key: str) -> Entry | None:
        """A fresh read (never from a watch or cache)."""

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int: ...

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        """Put only if absent. Raises RevisionConflict."""

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        """Put only if the key still has this revision. Raises RevisionConflict."""

    async def delete(self, key: str, *, revision: int | None = None) -> None: ...

    async def entries(self, pattern: str = ">") -> list[Entry]:
        """Read all present keys that match, from the stream's leader."""

    def watch(self, on_change: Callable[[Change], None], pattern: str = ">") -> Watch: ...


class Watch(Protocol):
    """A view of a bucket that is kept current."""

    async def run(self) -> None:
        """Report every present key, then every change, until cancelled. After a reconnect or a gap it lists again and
        reports keys that vanished meanwhile as `delete`."""

    async def ready(self, timeout_s: float) -> None:
        """Return once the first listing is complete. Raises RequestTimeout."""


class ObjectBucket(Protocol):
    """An object store: named values of any size."""

    async def put(self, name: str, data: bytes | bytearray, *, ttl_s: float | None = None) -> str:
        """Store whole, return the SHA-256 digest (hex). `ttl_s`: the object's own life, where its store has those."""

    async def get(self, name: str, *, timeout_s: float = 30.0) -> bytes:
        """Raises ObjectNotFound, ObjectCorrupt, RequestTimeout."""

    async def delete(self, name: str, *, ttl_s: float | None = None) -> None:
        """Fine when absent. `ttl_s`: how long the store remembers that it is gone, where objects have lives of their own."""


class BrokerStanding(Protocol):
    """The health of a connected server, and the place to report failed writes."""

    @property
    def trouble(self) -> str:
        """The reason why the server cannot be used; empty if it can."""

    def stored(self) -> None:
        """Something was stored just now."""

    def failed(self, error: JetStreamError) -> None:
        """Something could not be stored."""


class Messaging(Protocol):
    """A connection to NATS."""

    @property
    def connected(self) -> bool: ...

    @property
    def connected_since_s(self) -> float:
        """Loop time of the last (re)connect: the start of the hold-down in which absence is not death."""

    @property
    def max_payload(self) -> int:
        """Bytes the server takes in one message, headers included."""

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call back after every reconnect (not after the first connect)."""

    # core ---------------------------------------------------------------------------------------------------------------
    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Fire and forget, never blocks, order kept. While disconnected it is dropped and counted."""

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Raises NoResponder, RequestTimeout, NotConnected."""

    async def subscribe(self, subject: str, on_message: Callable[[Message], None], *, queue: str = "") -> Subscription: ...

    # streams ------------------------------------------------------------------------------------------------------------
    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        msg_id: str | None = None,
        ttl_s: float | None = None,
        expect_last_subject_seq: int | None = None,
        timeout_s: float = 2.0,
    ) -> PubAck:
        """Store one message and wait for the server's word; retries a missing leader or responder inside the timeout.

        Raises QueueFull, DiskFull, PayloadTooLarge, RevisionConflict, TopologyError (no stream takes the subject), and
        PublishUnknown when the outcome is not known.
        """

    def pull(
        self,
        stream: str,
        consumer: str,
        on_delivery: Callable[[Delivery], None],
        *,
        credit: int = 0,
        priority: int | None = None,
        expires_s: float = 2.0,
        on_missing: Callable[[], Awaitable[None]] | None = None,
    ) -> PullLoop:
        """`priority` (0 first … 9 last) is for consumers with the `prioritized` policy. `on_missing` is awaited when the
        consumer does not exist or was deleted, before the next try: it should make it again."""

    async def get_message(self, stream: str, seq: int) -> StoredMessage | None: ...

    async def delete_message(self, stream: str, seq: int) -> bool:
        """Return False when there is no such message, or it was deleted before."""

    async def subject_counts(self, stream: str, pattern: str) -> dict[str, int]:
        """Stored messages per subject."""

    async def subject_messages(self, stream: str, subject: str, *, limit: int = 1000) -> list[StoredMessage]:
        """The stored messages of one subject, oldest first."""

    def follow(self, stream: str, subject: str, *, start_seq: int, batch: int = 128) -> Follow:
        """Read `subject` from `start_seq` on. At most about 2 × `batch` messages wait here for the reader."""

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        """Fresh. Raises TopologyError."""

    async def purge_stream(self, stream: str, *, subject: str = "", up_to_seq: int = 0) -> int:
        """Remove messages for good: those of a subject, those up to and including a sequence, or all. Returns how many."""

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create or update."""

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Fine when absent."""

    def bucket(self, name: str) -> Bucket: ...

    def objects(self, name: str) -> ObjectBucket: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """A durable pull consumer as data. Times in seconds; `None` and -1 mean the server's default and no limit."""

    stream: str
    name: str
    filter_subjects: tuple[str, ...]
    ack_wait_s: float = 3.0
    max_deliver: int = -1
    max_ack_pending: int = 65536
    max_waiting: int = 512
    inactive_threshold_s: float | None = None
    prioritized: bool = False
    mem_storage: bool = False
    description: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
