"""Writes an object piece by piece with bounded memory; implements `ports.ObjectWriter`.

Chunks are written before the description, so that an object is there whole or not at all.  A writer that is left without a
commit removes its chunks; those of a process that died are removed by `ObjectStore.sweep`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType

import msgspec

from headrace.jetstream.core import wire
from headrace.jetstream.core.server_session import ServerSession
from headrace.jetstream.errors import JetStreamError, ObjectError, RequestTimeout
from headrace.jetstream.objects.layout import (
    CHUNK,
    INDEX,
    NAME_HEADER,
    ObjectInfo,
    ObjectSubjects,
    encode_digest,
    encode_index,
    encode_name,
    stored_now,
)
from headrace.jetstream.ports import PubAck, StoredObject

CHUNKS_IN_FLIGHT = 16
WRITE_TIMEOUT_S = 10.0
ABANDON_TIMEOUT_S = 2.0
CHUNKS_OUTLIVE_S = 2.0
LONGEST_PAUSE_S = 900.0  # between two chunks, or the last one and the commit: well below what a sweep waits


class ChunkWriter:
    """An object that is being written. Up to 16 chunks of 128 KiB wait for their acks."""

    def __init__(
        self,
        session: ServerSession,
        subjects: ObjectSubjects,
        name: str,
        ttl_s: float | None,
        replace: Callable[[ObjectInfo, float | None], Awaitable[None]],
    ) -> None:
        """`replace` writes the description and removes the chunks of the object that it replaces."""
        self._session = session
        self._subjects = subjects
        self._name = name
        self._nuid = secrets.token_hex(16)  # from which the ids of its chunks are made, and no other writer may know those
        self._replace = replace
        self._headers = {NAME_HEADER: encode_name(name)}
        self._loop = asyncio.get_running_loop()
        self._expires = None if ttl_s is None else self._loop.time() + ttl_s
        self._stored_at = self._loop.time()  # when the last chunk was
        self._hash = hashlib.sha256()
        self._rest = bytearray()
        self._publishing: deque[asyncio.Task[PubAck]] = deque()
        self._sequences: list[int] = []
        self._numbered = 0
        self._closed = False
        self._committed = False
        self.size = 0

    async def __aenter__(self) -> ChunkWriter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        if self._publishing:  # a purge could overtake them
            await asyncio.wait(self._publishing, timeout=ABANDON_TIMEOUT_S)
        for task in self._publishing:
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()
        if not self._committed:
            with contextlib.suppress(JetStreamError):
                await purge_chunks(self._session, self._subjects, self._nuid)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes, and wait while 16 chunks are on their way. Raises a JetStreamError; then nothing can be stored."""
        self._check_open()
        view = memoryview(data)
        self.size += len(view)
        at = 0
        if self._rest:
            at = min(CHUNK - len(self._rest), len(view))
            self._rest += view[:at]
            if len(self._rest) == CHUNK:
                chunk, self._rest = bytes(self._rest), bytearray()
                await self._send(chunk)
        while len(view) - at >= CHUNK:
            await self._send(bytes(view[at : at + CHUNK]))
            at += CHUNK
        self._rest += view[at:]

    async def commit(self, *, metadata: Mapping[str, str] | None = None) -> StoredObject:
        """Wait for all chunks and write the description, with which the object is there."""
        self._check_open()
        if self._rest:
            await self._send(bytes(self._rest))
        while self._publishing:
            await self._stored()
        self._closed = True
        self._check_pause()
        index = {INDEX: encode_index(self._sequences)} if len(self._sequences) > 1 else {}
        info = ObjectInfo(
            name=self._name,
            bucket=self._subjects.bucket,
            nuid=self._nuid,
            size=self.size,
            chunks=len(self._sequences),
            mtime=stored_now(),
            digest=encode_digest(self._hash.digest()),
            metadata={**(metadata or {}), **index},
        )
        await self._replace(info, self._ttl_s())
        self._committed = True
        return info.public()

    async def _send(self, chunk: bytes) -> None:
        self._check_pause()
        self._hash.update(chunk)
        while len(self._publishing) >= CHUNKS_IN_FLIGHT:
            await self._stored()
        number = self._numbered
        self._numbered += 1
        ttl_s = self._ttl_s()
        publishing = self._session.publish(
            self._subjects.chunks(self._nuid),
            chunk,
            headers=self._headers,
            msg_id=f"{self._nuid}-{number}",
            ttl_s=None if ttl_s is None else ttl_s + CHUNKS_OUTLIVE_S,
            timeout_s=WRITE_TIMEOUT_S,
        )
        self._publishing.append(self._loop.create_task(publishing))
        await asyncio.sleep(0)  # hashing a chunk takes a while; other tasks must run

    async def _stored(self) -> None:
        """Wait for the ack of the oldest chunk that is on its way."""
        oldest = self._publishing[0]
        await asyncio.wait([oldest])  # which leaves the publish alone if this is cancelled
        self._sequences.append(oldest.result().seq)
        self._publishing.popleft()
        self._stored_at = self._loop.time()

    def _ttl_s(self) -> float | None:
        return None if self._expires is None else max(1.0, self._expires - self._loop.time())

    def _check_open(self) -> None:
        if self._closed:
            raise ObjectError(f"the writer of object {self._name!r} of {self._subjects.bucket} was closed before")

    def _check_pause(self) -> None:
        pause_s = self._loop.time() - self._stored_at
        if pause_s > LONGEST_PAUSE_S and self._numbered:
            raise RequestTimeout(
                f"object {self._name!r} of {self._subjects.bucket} was not written on for {pause_s:.0f} s; "
                f"the most is {LONGEST_PAUSE_S:.0f} s"
            )


async def write_description(session: ServerSession, subjects: ObjectSubjects, info: ObjectInfo, ttl_s: float | None) -> None:
    """Write the description of an object in place of an earlier one."""
    await session.publish(
        subjects.description(info.name),
        msgspec.json.encode(info),
        headers={wire.ROLLUP: "sub"},
        msg_id=secrets.token_hex(16),
        ttl_s=ttl_s,
        timeout_s=WRITE_TIMEOUT_S,
    )


async def purge_chunks(session: ServerSession, subjects: ObjectSubjects, nuid: str) -> None:
    """Remove the chunks of an object. Raises a JetStreamError."""
    await session.api.call(f"STREAM.PURGE.{subjects.stream}", {"filter": subjects.chunks(nuid)})
