"""Declares object stores: named values of any size, read and written piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self


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
