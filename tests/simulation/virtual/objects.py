"""`headrace.jetstream.ports.ObjectBucket` over the simulated server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from headrace.jetstream.errors import ObjectError, ObjectNotFound, RequestTimeout
from headrace.jetstream.ports import StoredObject

T = TypeVar("T")
CHUNK = 128 * 1024


@dataclass(frozen=True, slots=True)
class SimObject:
    """A stored object."""

    data: bytes
    stored: float
    metadata: Mapping[str, str] = field(default_factory=dict)

    def described(self, name: str) -> StoredObject:
        return StoredObject(name, len(self.data), hashlib.sha256(self.data).hexdigest(), self.stored, self.metadata)


class Asker(Protocol):
    """A simulated connection (`SimMessaging`)."""

    loop: Any
    server: Any

    async def ask(self, lane: str, what: str, function: Callable[[], T]) -> T: ...


class SimObjects:
    """An object store seen from a process."""

    def __init__(self, messaging: Asker, name: str) -> None:
        self._messaging = messaging
        self._lane = f"OBJ {name}"
        self.name = name

    def writer(self, name: str, *, ttl_s: float | None = None) -> SimObjectWriter:
        return SimObjectWriter(self, name)

    async def put(self, name: str, data: bytes | bytearray, *, ttl_s: float | None = None) -> str:
        return (await self.keep(name, bytes(data), {})).digest

    async def keep(self, name: str, data: bytes, metadata: Mapping[str, str]) -> StoredObject:
        """Store an object in one step of the server."""
        held = SimObject(data, self._messaging.loop.time(), dict(metadata))
        await self._messaging.ask(self._lane, f"put object {name}", lambda: self._store.__setitem__(name, held))
        return held.described(name)

    async def get(self, name: str, *, timeout_s: float = 30.0) -> bytes:
        return (await self._read(name, timeout_s)).data

    async def chunks(
        self, name: str, *, offset: int = 0, length: int | None = None, timeout_s: float = 30.0
    ) -> AsyncIterator[bytes]:
        data = (await self._read(name, timeout_s)).data
        wanted = data[offset:] if length is None else data[offset : offset + length]
        for at in range(0, len(wanted), CHUNK):
            yield wanted[at : at + CHUNK]

    async def info(self, name: str) -> StoredObject:
        return (await self._read(name, 30.0)).described(name)

    async def _read(self, name: str, timeout_s: float) -> SimObject:
        held: SimObject | None
        try:
            async with asyncio.timeout(timeout_s):
                held = await self._messaging.ask(self._lane, f"get object {name}", lambda: self._store.get(name))
        except TimeoutError:
            raise RequestTimeout(f"object {name} of {self.name}: not read within {timeout_s} s") from None
        if held is None:
            raise ObjectNotFound(f"{self.name} has no object {name}")
        return held

    async def delete(self, name: str, *, ttl_s: float | None = None) -> None:
        await self._messaging.ask(self._lane, f"delete object {name}", lambda: self._store.pop(name, None))

    async def sweep(self, *, idle_s: float) -> int:
        return 0  # an unfinished object is in the memory of its writer

    async def list(self, prefix: str = "") -> list[StoredObject]:
        def listed() -> list[StoredObject]:
            return [held.described(name) for name, held in self._store.items() if name.startswith(prefix)]

        return await self._messaging.ask(self._lane, f"list objects {prefix}", listed)

    async def present(self, names: Sequence[str]) -> set[str]:
        return await self._messaging.ask(self._lane, "look for objects", lambda: set(names) & self._store.keys())

    @property
    def _store(self) -> dict[str, SimObject]:
        store: dict[str, SimObject] = self._messaging.server.objects[self.name]
        return store


class SimObjectWriter:
    """Collects an object and stores it with the commit."""

    def __init__(self, objects: SimObjects, name: str) -> None:
        self._objects = objects
        self._name = name
        self._data = bytearray()
        self._closed = False

    @property
    def size(self) -> int:
        return len(self._data)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._closed = True

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._check_open()
        self._data += data
        await asyncio.sleep(0)

    async def commit(self, *, metadata: Mapping[str, str] | None = None) -> StoredObject:
        self._check_open()
        self._closed = True
        return await self._objects.keep(self._name, bytes(self._data), metadata or {})

    def _check_open(self) -> None:
        if self._closed:
            raise ObjectError(f"the writer of object {self._name!r} was closed before")
