"""A stream of jobs in memory, whose publishes and reads fail as they are told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.jetstream.errors import (
    JetStreamError,
    NotConnected,
    ObjectNotFound,
    PublishUnknown,
    QueueFull,
    RevisionConflict,
)
from headrace.jetstream.ports import Outgoing, PubAck, StoredMessage
from tests.support.grouped_publishes import publish_each


class FakeObjects:
    """An object store in memory."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    async def put(self, name: str, data: bytes) -> str:
        self.held[name] = data
        return ""

    async def get(self, name: str) -> bytes:
        if name not in self.held:
            raise ObjectNotFound(name)
        return self.held[name]

    async def delete(self, name: str) -> None:
        self.held.pop(name, None)


class FakeStreams:
    """Subjects with compare-and-set. `faults` is used up one per call: "" (none), full, lose, loseack, stale, unread."""

    def __init__(self, faults: Sequence[str] = ()) -> None:
        self.faults = list(faults)
        self.messages: list[StoredMessage] = []
        self.store = FakeObjects()
        self.published: list[bytes] = []

    def objects(self, _name: str) -> FakeObjects:
        return self.store

    def _fault(self) -> str:
        return self.faults.pop(0) if self.faults else ""

    def of(self, subject: str) -> list[StoredMessage]:
        return [message for message in self.messages if message.subject == subject]

    def put(self, subject: str, data: bytes) -> int:
        """Store a message of another writer."""
        self.messages.append(StoredMessage(subject, len(self.messages) + 1, data))
        return len(self.messages)

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        msg_id: str | None = None,
        expect_last_subject_seq: int | None = None,
        timeout_s: float = 2.0,
    ) -> PubAck:
        self.published.append(data)
        fault = self._fault()
        if fault == "lose":
            raise PublishUnknown("lost")
        if fault == "full":
            raise QueueFull("full")
        own = self.of(subject)
        if expect_last_subject_seq is not None and (own[-1].seq if own else 0) != expect_last_subject_seq:
            raise RevisionConflict("changed")
        seq = self.put(subject, data)
        if fault == "loseack":
            raise PublishUnknown("no ack")
        return PubAck("S", seq)

    async def publish_all(self, messages: Sequence[Outgoing], *, timeout_s: float = 2.0) -> list[PubAck | JetStreamError]:
        return await publish_each(self.publish, messages, timeout_s=timeout_s)

    async def get_message(self, _stream: str, seq: int) -> StoredMessage | None:
        return next((message for message in self.messages if message.seq == seq), None)

    async def last_messages(self, _stream: str, subjects: Sequence[str]) -> list[StoredMessage]:
        fault = self._fault()
        if fault == "unread":
            raise NotConnected("no answer")
        lag = 1 if fault == "stale" else 0
        found = [self.of(subject) for subject in subjects]
        return [own[-1 - lag] for own in found if len(own) > lag]

    async def subject_messages(self, _stream: str, subject: str, *, limit: int, start_seq: int = 1) -> list[StoredMessage]:
        return [message for message in self.of(subject) if message.seq >= start_seq][:limit]

    def send(self, subject: str, data: bytes) -> None:
        """Lose a message of core NATS."""
