"""Declares a connection to NATS, and what is delivered and read over it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports.buckets import Bucket
from headrace.jetstream.ports.objects import ObjectBucket
from headrace.jetstream.ports.records import (
    ConsumerSpec,
    Message,
    MessageBatch,
    Outgoing,
    PubAck,
    StoredMessage,
    StreamState,
)


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

    def bucket(self, name: str) -> Bucket: ...

    def objects(self, name: str) -> ObjectBucket: ...
