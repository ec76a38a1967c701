"""Buckets and object stores in the memory of a test, with a clock that the test moves."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from headrace.jetstream.errors import ObjectNotFound, RevisionConflict
from headrace.jetstream.ports import Entry, StoredObject


@dataclass
class MemoryClock:
    """Unix time."""

    at: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.at


class MemoryBucket:
    """`headrace.jetstream.ports.Bucket`, without watches."""

    def __init__(self, clock: MemoryClock) -> None:
        self._clock = clock
        self._kept: dict[str, tuple[Entry, float | None]] = {}
        self._revision = 0

    @property
    def keys(self) -> list[str]:
        return sorted(key for key in self._kept if self._there(key) is not None)

    def _there(self, key: str) -> Entry | None:
        entry, until = self._kept.get(key, (None, None))
        return entry if entry is not None and (until is None or until > self._clock()) else None

    def _write(self, key: str, value: bytes, ttl_s: float | None) -> int:
        self._revision += 1
        self._kept[key] = (Entry(key, value, self._revision), None if ttl_s is None else self._clock() + ttl_s)
        return self._revision

    async def get(self, key: str) -> Entry | None:
        return self._there(key)

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return self._write(key, value, ttl_s)

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, unmarked: bool = False) -> int:
        if self._there(key) is not None:
            raise RevisionConflict(key)
        return self._write(key, value, ttl_s)

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        entry = self._there(key)
        if entry is None or entry.revision != revision:
            raise RevisionConflict(key)
        return self._write(key, value, ttl_s)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        self._kept.pop(key, None)

    async def entries(self, pattern: str = ">") -> list[Entry]:
        regex = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
        there = (self._there(key) for key in self._kept if re.fullmatch(regex, key))
        return [entry for entry in there if entry is not None]


@dataclass
class _Held:
    data: bytes
    stored: float
    until: float | None
    metadata: Mapping[str, str] = field(default_factory=dict)


class MemoryObjects:
    """`headrace.jetstream.ports.ObjectBucket`."""

    def __init__(self, clock: MemoryClock) -> None:
        self.clock = clock
        self.kept: dict[str, _Held] = {}
        self.open_writers = 0
        self.swept = 0
        self.broken: Exception | None = None

    @property
    def names(self) -> list[str]:
        return sorted(name for name, held in self.kept.items() if held.until is None or held.until > self.clock())

    def _held(self, name: str) -> _Held:
        if name not in self.names:
            raise ObjectNotFound(name)
        return self.kept[name]

    def writer(self, name: str, *, ttl_s: float | None = None) -> MemoryWriter:
        return MemoryWriter(self, name, ttl_s)

    async def put(self, name: str, data: bytes | bytearray, *, ttl_s: float | None = None) -> str:
        async with self.writer(name, ttl_s=ttl_s) as writer:
            await writer.write(data)
            return (await writer.commit()).digest

    async def get(self, name: str, *, timeout_s: float = 30.0) -> bytes:
        return self._held(name).data

    async def chunks(
        self, name: str, *, offset: int = 0, length: int | None = None, timeout_s: float = 30.0
    ) -> AsyncIterator[bytes]:
        data = self._held(name).data[offset:]
        data = data if length is None else data[:length]
        for at in range(0, len(data), 10):
            yield data[at : at + 10]

    async def info(self, name: str) -> StoredObject:
        held = self._held(name)
        return StoredObject(name, len(held.data), hashlib.sha256(held.data).hexdigest(), held.stored, held.metadata)

    async def delete(self, name: str, *, ttl_s: float | None = None) -> None:
        self.kept.pop(name, None)

    async def sweep(self, *, idle_s: float) -> int:
        self.swept += 1
        return 0

    async def list(self, prefix: str = "") -> list[StoredObject]:
        return [await self.info(name) for name in self.names if name.startswith(prefix)]


class MemoryWriter:
    """`headrace.jetstream.ports.ObjectWriter`. It fails with what a test puts into `MemoryObjects.broken`."""

    def __init__(self, objects: MemoryObjects, name: str, ttl_s: float | None) -> None:
        self._objects = objects
        self._name = name
        self._ttl_s = ttl_s
        self._data = bytearray()

    @property
    def size(self) -> int:
        return len(self._data)

    async def __aenter__(self) -> Self:
        self._objects.open_writers += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._objects.open_writers -= 1

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._objects.broken is not None:
            raise self._objects.broken
        self._data += data

    async def commit(self, *, metadata: Mapping[str, str] | None = None) -> StoredObject:
        now = self._objects.clock()
        until = None if self._ttl_s is None else now + self._ttl_s
        self._objects.kept[self._name] = _Held(bytes(self._data), now, until, metadata or {})
        return await self._objects.info(self._name)


class MemoryMessaging:
    """The part of `headrace.jetstream.ports.Messaging` that stores use."""

    def __init__(self, clock: MemoryClock | None = None) -> None:
        self.clock = clock or MemoryClock()
        self.buckets: dict[str, MemoryBucket] = {}
        self.stores: dict[str, MemoryObjects] = {}

    def bucket(self, name: str) -> MemoryBucket:
        return self.buckets.setdefault(name, MemoryBucket(self.clock))

    def objects(self, name: str) -> MemoryObjects:
        return self.stores.setdefault(name, MemoryObjects(self.clock))
