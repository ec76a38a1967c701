"""The part of NATS that snapshots use, in memory, with a place to crash before and after everything that it does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from math import inf
from typing import Any

from headrace.jetstream.errors import ObjectNotFound, RevisionConflict, StreamTrimmed
from headrace.jetstream.ports import Entry, MessageBatch, StoredMessage, StreamState
from headrace.jetstream.subjects import Subjects

SUBJECTS = Subjects("hr")
POOL = "pool"


class Crash(BaseException):
    """The process is gone."""


class FakeNats:
    """`Messaging`, as far as it is needed here. `crash_at`: the number of the point at which the process dies."""

    def __init__(self) -> None:
        self.messages: dict[int, StoredMessage] = {}
        self.last_seq = 0
        self.first_seq = 1
        self.created = "2026-01-01T00:00:00Z"
        self.buckets: dict[str, dict[str, Entry]] = {}
        self.stores: dict[str, dict[str, bytes]] = {}
        self.revision = 0
        self.points: list[str] = []
        self.crash_at: int | None = None
        self.sent: list[str] = []
        self.stored = asyncio.Event()
        self.connected = True
        self.connected_since_s = 0.0

    async def point(self, name: str) -> None:
        self.points.append(name)
        if self.crash_at is not None and len(self.points) > self.crash_at:
            raise Crash(name)
        await asyncio.sleep(0)

    def begin(self, crash_at: int | None) -> None:
        """Count points from here."""
        self.points = []
        self.crash_at = crash_at

    # the stream ---------------------------------------------------------------------------------------------------------------
    def append(self, subject: str, data: bytes) -> StoredMessage:
        self.last_seq += 1
        message = self.messages[self.last_seq] = StoredMessage(subject, self.last_seq, data)
        self.stored.set()
        return message

    def after(self, seq: int) -> list[StoredMessage]:
        return [m for s, m in sorted(self.messages.items()) if s > seq and m.subject.startswith(f"hr.kv.{POOL}.")]

    def drop_up_to(self, seq: int) -> None:
        """As age or bytes would."""
        for gone in [s for s in self.messages if s <= seq]:
            del self.messages[gone]
        self.first_seq = min(self.messages, default=self.last_seq + 1)

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        await self.point("state")
        own = self.after(0)
        return StreamState(self.first_seq, self.last_seq, len(self.messages), self.created, own[-1].seq if own else 0)

    async def purge_stream(self, stream: str, *, subject: str = "", up_to_seq: int = 0) -> int:
        await self.point("before purge")
        gone = [m.seq for m in self.after(0) if m.seq <= up_to_seq]
        for seq in gone:
            del self.messages[seq]
        self.first_seq = min(self.messages, default=self.last_seq + 1)
        await self.point("after purge")
        return len(gone)

    def follow(self, stream: str, subject: str, *, start_seq: int, batch: int = 128) -> FakeFollow:
        return FakeFollow(self, start_seq)

    # the rest -----------------------------------------------------------------------------------------------------------------
    def bucket(self, name: str) -> FakeBucket:
        return FakeBucket(self, self.buckets.setdefault(name, {}))

    def objects(self, name: str) -> FakeObjects:
        return FakeObjects(self, self.stores.setdefault(name, {}))

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        self.sent.append(subject)

    def on_reconnect(self, callback: Callable[[], Any]) -> Callable[[], None]:
        self.reconnected = callback
        return lambda: None


class FakeFollow:
    def __init__(self, nats: FakeNats, start_seq: int) -> None:
        self.nats = nats
        self.position = start_seq - 1
        self.checked = False

    async def next(self) -> MessageBatch:
        nats = self.nats
        if not self.checked and nats.first_seq > self.position + 1:
            raise StreamTrimmed(f"begins with {nats.first_seq}", wanted=self.position + 1)
        self.checked = True
        while not (found := nats.after(self.position)):
            nats.stored.clear()
            await nats.stored.wait()
        self.position = found[-1].seq
        return MessageBatch(found, self.position, 0)

    async def close(self) -> None:
        return None


class FakeBucket:
    def __init__(self, nats: FakeNats, entries: dict[str, Entry]) -> None:
        self.nats = nats
        self.entries = entries

    async def get(self, key: str) -> Entry | None:
        await self.nats.point(f"get {key}")
        return self.entries.get(key)

    async def age_s(self) -> float:
        return inf

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, unmarked: bool = False) -> int:
        return await self.update(key, value, revision=0)

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        await self.nats.point(f"before writing {key}")
        entry = self.entries.get(key)
        if (entry.revision if entry is not None else 0) != revision:
            raise RevisionConflict(f"{key} is not at {revision}")
        self.nats.revision += 1
        self.entries[key] = Entry(key, bytes(value), self.nats.revision)
        await self.nats.point(f"after writing {key}")
        return self.nats.revision

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        await self.nats.point(f"delete {key}")
        self.entries.pop(key, None)


class FakeObjects:
    def __init__(self, nats: FakeNats, objects: dict[str, bytes]) -> None:
        self.nats = nats
        self.objects = objects

    async def put(self, name: str, data: bytes, *, ttl_s: float | None = None) -> str:
        await self.nats.point("before upload")
        half = self.objects.pop(name, None)
        await self.nats.point(
            "half uploaded"
        )  # the real one keeps the old object until the new one is there; worse is possible
        del half
        self.objects[name] = bytes(data)
        await self.nats.point("after upload")
        return hashlib.sha256(data).hexdigest()

    async def get(self, name: str, *, timeout_s: float = 30.0) -> bytes:
        await self.nats.point("read object")
        if name not in self.objects:
            raise ObjectNotFound(name)
        return self.objects[name]
