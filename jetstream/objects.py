"""Reads and writes object stores in the layout of ADR-20, so that `nats object ls|get|put` work; implements
`ports.ObjectBucket`.

Chunks are read in pages by direct batch reads: this leaves no consumer behind, joins chunks in linear time, and has one
deadline for the whole. Size and digest are checked.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from datetime import UTC, datetime

import msgspec

from headrace.jetstream.core import wire
from headrace.jetstream.core.api import ApiError
from headrace.jetstream.core.natspy import NUID
from headrace.jetstream.core.server_session import ServerSession
from headrace.jetstream.errors import JetStreamError, ObjectCorrupt, ObjectNotFound, RequestTimeout, TopologyError

CHUNK = 128 * 1024
CHUNKS_IN_FLIGHT = 16
CHUNKS_PER_READ = 48  # 6 MiB per round trip
WRITE_TIMEOUT_S = 10.0
CHUNKS_OUTLIVE_S = 2.0

_ids = NUID()


class _Options(msgspec.Struct, omit_defaults=True):
    max_chunk_size: int = CHUNK


class ObjectInfo(msgspec.Struct, omit_defaults=True):
    """The stored description of an object (ADR-20)."""

    name: str
    bucket: str
    nuid: str
    size: int = 0
    chunks: int = 0
    mtime: str = ""
    digest: str = ""
    deleted: bool = False
    options: _Options = msgspec.field(default_factory=_Options)


class ObjectStore:
    """An object store in one bucket."""

    def __init__(self, session: ServerSession, name: str) -> None:
        self.name = name
        self._session = session
        self._stream = f"OBJ_{name}"

    async def put(self, name: str, data: bytes | bytearray, *, ttl_s: float | None = None) -> str:
        old = await self._info(name)
        nuid = _ids.next().decode()
        subject = self._chunks(nuid)
        digest = hashlib.sha256()
        view = memoryview(data)
        gate = asyncio.Semaphore(CHUNKS_IN_FLIGHT)
        # Chunks are written before the description and removed after it, so that an object is there whole or not at all.
        chunk_ttl_s = None if ttl_s is None else ttl_s + CHUNKS_OUTLIVE_S

        async def store(chunk: bytes) -> None:
            try:
                await self._session.publish(subject, chunk, ttl_s=chunk_ttl_s, timeout_s=WRITE_TIMEOUT_S)
            finally:
                gate.release()

        info = ObjectInfo(name=name, bucket=self.name, nuid=nuid, size=len(data), mtime=datetime.now(UTC).isoformat())
        try:
            async with asyncio.TaskGroup() as group:
                for start in range(0, len(data), CHUNK):
                    chunk = bytes(view[start : start + CHUNK])
                    digest.update(chunk)
                    await gate.acquire()
                    group.create_task(store(chunk))
                    info.chunks += 1
                    await asyncio.sleep(0)  # hashing a chunk takes a while; other tasks must run
            info.digest = "SHA-256=" + base64.urlsafe_b64encode(digest.digest()).decode()
            await self._write_info(info, ttl_s=ttl_s)
        except BaseExceptionGroup as group_error:
            await self._purge_quietly(nuid)
            raise _first(group_error) from None
        except JetStreamError:
            await self._purge_quietly(nuid)
            raise
        if old is not None and old.nuid != nuid:
            await self._purge_quietly(old.nuid)
        return digest.hexdigest()

    async def get(self, name: str, *, timeout_s: float = 30.0) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                info = await self._info(name)
                while info is not None and not info.deleted:
                    try:
                        return await self._read(info, timeout_s)
                    except ObjectCorrupt:
                        before, info = info, await self._info(name)
                        if info is not None and not info.deleted and info.nuid == before.nuid:
                            raise  # otherwise it was replaced during the read, and its chunks are gone
                raise ObjectNotFound(f"there is no object {name!r} in {self.name}")
        except TimeoutError:
            raise RequestTimeout(f"object {name!r} of {self.name} was not read in {timeout_s} s") from None

    async def delete(self, name: str, *, ttl_s: float | None = None) -> None:
        info = await self._info(name)
        if info is None or info.deleted:
            return
        nuid = info.nuid
        info.deleted, info.size, info.chunks, info.digest = True, 0, 0, ""
        info.mtime = datetime.now(UTC).isoformat()
        await self._write_info(info, ttl_s=ttl_s)
        await self._purge_quietly(nuid)

    async def _read(self, info: ObjectInfo, timeout_s: float) -> bytes:
        subject = self._chunks(info.nuid)
        chunks: list[bytes] = []
        digest = hashlib.sha256()
        seq = 1
        while len(chunks) < info.chunks:
            page = await self._session.reader.batch(
                self._stream,
                {"seq": seq, "next_by_subj": subject, "batch": min(CHUNKS_PER_READ, info.chunks - len(chunks))},
                timeout_s=timeout_s,
            )
            if not page:
                break
            for message in page:
                digest.update(message.data)
                chunks.append(message.data)
            seq = page[-1].seq + 1
            await asyncio.sleep(0)  # hashing a page takes milliseconds; other tasks must run
        data = b"".join(chunks)
        if len(data) != info.size or len(chunks) != info.chunks:
            raise ObjectCorrupt(
                f"object {info.name!r} of {self.name} has {len(data)} bytes in {len(chunks)} chunks, "
                f"not {info.size} in {info.chunks}"
            )
        _, _, stored = info.digest.partition("=")
        if stored and base64.urlsafe_b64decode(stored + "=" * (-len(stored) % 4)) != digest.digest():
            raise ObjectCorrupt(f"object {info.name!r} of {self.name} does not have its digest {info.digest}")
        return data

    async def _info(self, name: str) -> ObjectInfo | None:
        try:
            stored = await self._session.reader.message(self._stream, last_of=self._meta(name))
        except TopologyError:
            raise TopologyError(f"there is no object store {self.name}") from None
        if stored is None:
            return None
        try:
            return msgspec.json.decode(stored.data, type=ObjectInfo)
        except msgspec.MsgspecError as error:
            raise ObjectCorrupt(f"the description of object {name!r} of {self.name} cannot be read: {error}") from error

    async def _write_info(self, info: ObjectInfo, *, ttl_s: float | None = None) -> None:
        await self._session.publish(
            self._meta(info.name),
            msgspec.json.encode(info),
            headers={wire.ROLLUP: "sub"},
            msg_id=_ids.next().decode(),
            ttl_s=ttl_s,
            timeout_s=WRITE_TIMEOUT_S,
        )

    async def _purge_quietly(self, nuid: str) -> None:
        """Remove chunks that no description refers to. A failure wastes space and is no error."""
        with contextlib.suppress(ApiError, RequestTimeout):
            await self._session.api.call(f"STREAM.PURGE.{self._stream}", {"filter": self._chunks(nuid)})

    def _meta(self, name: str) -> str:
        return f"$O.{self.name}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    def _chunks(self, nuid: str) -> str:
        return f"$O.{self.name}.C.{nuid}"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
