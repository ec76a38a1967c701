"""Defines what is passed over a connection to NATS: messages, confirmations, bounds of streams, and consumers as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec


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
    """A message to store, with what `Messaging.publish` takes for it."""

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
