"""The interface to NATS that other folders use: messages, buckets, object stores, pulls and follows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self, runtime_checkable

import msgspec

from headrace.jetstream.errors import JetStreamError


class Message(msgspec.Struct, frozen=True):
    """A core NATS message as received. `reply` is empty when no answer is expected."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] | None = None


class PubAck(msgspec.Struct, frozen=True):
    """The server's confirmation that a message is stored. `duplicate`: a message with this id was stored before.

    `total`: of a stream that counts, the number of the subject after the addition; None for a duplicate.
    """

    stream: str
    seq: int
    duplicate: bool = False
    total: int | None = None


class Outgoing(NamedTuple):
    """A message to store, with the arguments of `Messaging.publish`."""

    subject: str
    data: bytes
    headers: Mapping[str, str] | None = None
    msg_id: str | None = None
    expect_last_subject_seq: int | None = None


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in a stream. `at`: Unix time at which it was stored, 0 if the kind of read does not return it."""

    subject: str
    seq: int
    data: bytes
    headers: Mapping[str, str] | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamState:
    """Bounds of a stream. An empty stream has `first_seq` = `last_seq` + 1.

    `created` distinguishes the stream from a later one of the same name. `last_of_subject`: sequence of the last message of the
    requested subject, 0 if there is none; it was read after the other fields. `max_bytes` below 1: no limit.
    """

    first_seq: int
    last_seq: int
    messages: int
    created: str
    last_of_subject: int = 0
    bytes: int = 0
    max_bytes: int = -1


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Messages that a follow has read, in order, possibly none.

    `position`: all messages up to this sequence have been handed out. `pending`: messages in the stream behind these.
    """

    messages: Sequence[StoredMessage]
    position: int
    pending: int


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


@dataclass(frozen=True, slots=True)
class Unacked:
    """The messages of a consumer that wait for an ack: `messages` of them, behind the sequence `floor` and up to `last`."""

    floor: int
    last: int
    messages: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a bucket with its value. `revision` is the stream sequence that compare-and-set refers to."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a key that a watch reports. `value` is None except for `put`.

    `missing`: the key was gone when the keys were listed again, and nothing says why. A server that was restarted has forgotten
    the keys of a bucket in memory, whose holders write them again.
    """

    key: str
    value: bytes | None
    revision: int
    kind: Literal["put", "delete", "expired", "missing"] = "put"


KeyState = Literal["present", "deleted", "expired", "unknown"]


class Bucket(Protocol):
    """A key-value bucket. A key that was deleted or has expired is absent, also while its marker is still stored."""

    async def get(self, key: str) -> Entry | None:
        """Read a key from the server, never from a watch or cache."""

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int: ...

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, unmarked: bool = False) -> int:
        """Write the key only if it is absent; with `unmarked` only if its state is `unknown`. Raises RevisionConflict."""

    async def state(self, key: str) -> KeyState:
        """Read from the server whether a key is present, or why it is absent.

        `unknown`: the bucket has no record of it. It never had one, its marker is gone, or the bucket was made again.
        """

    async def age_s(self) -> float:
        """Return how long ago the server made the bucket, by its wall clock.

        One in memory is made again after each restart of the server.
        """

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        """Write the key only if it still has this revision. Raises RevisionConflict."""

    async def delete(self, key: str, *, revision: int | None = None) -> None: ...

    async def entries(self, pattern: str = ">") -> list[Entry]:
        """Read all present keys that match, from the stream's leader."""

    def watch(self, on_change: Callable[[Change], None], pattern: str = ">") -> Watch: ...


class Watch(Protocol):
    """A view of a bucket that is kept current."""

    async def run(self) -> None:
        """Report every present key, then every change, until cancelled.

        After a reconnect or a gap it lists the keys again and reports those that vanished meanwhile as `missing`. Deletions by
        writers are reported of such keys, and of unknown ones, too, possibly more than once.
        """

    async def ready(self, timeout_s: float) -> None:
        """Return once the first listing is complete. Raises RequestTimeout."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The description of an object. `digest`: SHA-256 of the content, hex; `stored`: when it was, Unix time."""

    name: str
    size: int
    digest: str
    stored: float
    metadata: Mapping[str, str] = field(default_factory=dict)


class ObjectWriter(Protocol):
    """An object that is being written, as an async context manager. Left without a commit, it removes what it has stored."""

    @property
    def size(self) -> int:
        """The bytes that were written so far."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes, and wait while much of them is on its way. Raises a JetStreamError; then nothing can be stored."""

    async def commit(self, *, metadata: Mapping[str, str] | None = None) -> StoredObject:
        """Store the object with all its bytes, in place of one of the same name. Raises a JetStreamError."""


class ObjectBucket(Protocol):
    """An object store: named values of any size."""

    def writer(self, name: str, *, ttl_s: float | None = None) -> ObjectWriter:
        """Write an object piece by piece, in bounded memory. It is there with the commit. `ttl_s` as for `put`, from now on."""

    async def put(self, name: str, data: bytes | bytearray, *, ttl_s: float | None = None) -> str:
        """Store the whole object and return its SHA-256 digest (hex). `ttl_s`: time to live, in stores with one per object."""

    async def get(self, name: str, *, timeout_s: float = 30.0) -> bytes:
        """Read an object. Raises ObjectNotFound, ObjectCorrupt, RequestTimeout."""

    def chunks(self, name: str, *, offset: int = 0, length: int | None = None, timeout_s: float = 30.0) -> AsyncIterator[bytes]:
        """Read an object, or a range of its bytes, piece by piece; a range ends where the object does. `timeout_s`: per read.

        Raises as `get` does. Of a whole object the digest is checked after the last piece.
        """

    async def info(self, name: str) -> StoredObject:
        """Read the description of an object. Raises ObjectNotFound."""

    async def present(self, names: Sequence[str]) -> set[str]:
        """Return which of these objects are there, in one round trip for many of them."""

    async def list(self, prefix: str = "") -> list[StoredObject]:
        """Return the descriptions of the objects whose names begin so, in no order. Reads all descriptions of the store."""

    async def delete(self, name: str, *, ttl_s: float | None = None) -> None:
        """Delete an object; an absent one is fine. `ttl_s`: life of its deletion marker, in stores with one TTL per object."""

    async def sweep(self, *, idle_s: float) -> int:
        """Remove what dead writers left: chunks without a description, to which nothing was added for so long.

        Returns the number of such objects. `idle_s` must be far longer than a writer may pause.
        """


@runtime_checkable
class Delivery(Protocol):
    """A stored message that was delivered to this process. Acks are fire and forget and never raise while disconnected."""

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
    @property
    def stored(self) -> float: ...  # Unix time at which the message was stored
    def ack(self) -> None: ...
    def nak(self, delay_s: float = 0.0) -> None: ...
    def progress(self) -> None: ...
    def term(self, reason: str = "") -> None: ...


class PullLoop(Protocol):
    """A continuous pull on one consumer. Outstanding pull requests never exceed the credit."""

    async def run(self) -> None:
        """Pull until cancelled or stopped. Survives reconnects and server restarts."""

    def add_credit(self, n: int = 1) -> None:
        """Allow `n` more deliveries (negative: fewer). Each delivery uses up one."""

    @property
    def credit(self) -> int:
        """The number of deliveries still allowed."""

    async def stop(self) -> None:
        """End `run` and withdraw the open pull requests, so that nothing is delivered to a reader that has left."""


class Follow(Protocol):
    """Reads one subject (or pattern) of a stream in order, without a gap and without an ack. For one reader at a time."""

    @property
    def position(self) -> int:
        """The sequence up to which all messages of the subject have been handed out."""

    async def next(self) -> MessageBatch:
        """Wait for more messages. Survives reconnects and server restarts, and may be cancelled and called again.

        Raises StreamTrimmed when messages behind `position` were removed before they could be read.
        """

    async def close(self) -> None:
        """Delete the consumer on the server."""


class Subscription(Protocol):
    """Interest in a subject. Callbacks may still run until `unsubscribe` returns."""

    async def unsubscribe(self) -> None: ...


class HealthPort(Protocol):
    """The health of a connected server, and the place to report failed writes."""

    @property
    def trouble(self) -> str:
        """The reason why the server cannot be used; empty if it can."""

    def stored(self) -> None:
        """Note that a message was stored just now."""

    def failed(self, error: JetStreamError) -> None:
        """Note that a message could not be stored."""


class Messaging(Protocol):
    """A connection to NATS."""

    @property
    def connected(self) -> bool: ...

    @property
    def connected_since_s(self) -> float:
        """Loop time of the last (re)connect: the start of the hold-down in which absence is not death."""

    @property
    def max_payload(self) -> int:
        """The most bytes that the server accepts in one message, headers included."""

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Call `callback` after every reconnect, but not after the first connect. Returns what ends that."""

    # Core:

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Send without waiting, in order. While disconnected the message is dropped and counted."""

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return its answer. Raises NoResponder, RequestTimeout, NotConnected."""

    async def subscribe(self, subject: str, on_message: Callable[[Message], None], *, queue: str = "") -> Subscription: ...

    # Streams:

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
        """Store one message and wait for the confirmation; retries a missing leader or responder within the timeout.

        Raises QueueFull, DiskFull, PayloadTooLarge, RevisionConflict, TopologyError (no stream takes the subject), and
        PublishUnknown when the outcome is not known.
        """

    async def publish_all(self, messages: Sequence[Outgoing], *, timeout_s: float = 2.0) -> list[PubAck | JetStreamError]:
        """Store messages, each by itself, and wait for all of their confirmations at once.

        Returns for each message, in their order, what `publish` returns or raises.
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
        """Return a pull loop on a consumer. `priority` (0 first … 9 last) is for consumers with the `prioritized` policy.

        `on_missing` is awaited when the consumer does not exist or was deleted, before the next try: it should create it again.
        """

    async def get_message(self, stream: str, seq: int) -> StoredMessage | None: ...

    async def delete_message(self, stream: str, seq: int) -> bool:
        """Return False when there is no such message, or it was deleted before."""

    async def subject_counts(self, stream: str, pattern: str) -> dict[str, int]:
        """Return the number of stored messages per subject."""

    async def subject_messages(
        self, stream: str, subject: str, *, limit: int = 1000, start_seq: int = 1
    ) -> list[StoredMessage]:
        """Return the stored messages of one subject (or pattern) from a sequence on, oldest first.

        With replicas the answer may be old.
        """

    async def last_messages(self, stream: str, subjects: Sequence[str]) -> list[StoredMessage]:
        """Return the last message of each of these subjects that has one, in no order. With replicas the answer may be old."""

    def follow(self, stream: str, subject: str, *, start_seq: int, batch: int = 128) -> Follow:
        """Read `subject` from `start_seq` on. At most about 2 × `batch` messages wait here for the reader."""

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        """Read the bounds of a stream from the server. Raises TopologyError."""

    async def purge_stream(self, stream: str, *, subject: str = "", up_to_seq: int = 0) -> int:
        """Remove the messages of a subject, those up to and including a sequence, or all. Returns their number."""

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create or update a consumer. Raises TopologyError."""

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer; an absent one is fine."""

    async def consumer_subjects(self, stream: str) -> dict[str, tuple[str, ...]]:
        """Return the name of each consumer of a stream, and the subjects that it reads. Raises TopologyError."""

    async def unacked(self, stream: str, consumer: str) -> Unacked:
        """Return where the messages are that a consumer has delivered and that wait for an ack.

        Raises ApiError for one that is not there, AccessDenied, RequestTimeout, NotConnected.
        """

    def bucket(self, name: str) -> Bucket: ...

    def objects(self, name: str) -> ObjectBucket: ...
