"""Reads and writes object stores in the layout of ADR-20, so that `nats object ls|get|put` work; implements
`ports.ObjectBucket`.

Chunks are read in pages by direct batch reads: this leaves no consumer behind, joins chunks in linear time, and has a deadline.
Size and digest are checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec
import structlog

from headrace.jetstream.core.server_session import ServerSession
from headrace.jetstream.errors import JetStreamError, ObjectCorrupt, ObjectNotFound, RequestTimeout, TopologyError
from headrace.jetstream.objects.layout import NAME_HEADER, ObjectInfo, ObjectSubjects, decode_name, stored_now
from headrace.jetstream.objects.writer import ChunkWriter, purge_chunks, write_description
from headrace.jetstream.ports import StoredMessage, StoredObject

log = structlog.get_logger(__name__)

CHUNKS_PER_READ = 48  # 6 MiB per round trip
CHUNKS_PER_STEP = 16  # of a reader that takes the object piece by piece
READ_TIMEOUT_S = 30.0


class ObjectStore:
    """An object store in one bucket."""

    def __init__(self, session: ServerSession, name: str) -> None:
        self.name = name
        self._session = session
        self._subjects = ObjectSubjects(name)
        self._stream = self._subjects.stream

    # writing

    def writer(self, name: str, *, ttl_s: float | None = None) -> ChunkWriter:
        return ChunkWriter(self._session, self._subjects, name, ttl_s, self._replace)

    async def put(self, name: str, data: bytes | bytearray, *, ttl_s: float | None = None) -> str:
        async with self.writer(name, ttl_s=ttl_s) as writer:
            await writer.write(data)
            stored = await writer.commit()
        return stored.digest

    async def delete(self, name: str, *, ttl_s: float | None = None) -> None:
        info = await self._info(name)
        if info is None or info.deleted:
            return
        nuid = info.nuid
        info.deleted, info.size, info.chunks, info.digest, info.metadata = True, 0, 0, "", {}
        info.mtime = stored_now()
        await write_description(self._session, self._subjects, info, ttl_s)
        await self._purge_quietly(nuid)

    async def _replace(self, info: ObjectInfo, ttl_s: float | None) -> None:
        old = await self._info(info.name)
        await write_description(self._session, self._subjects, info, ttl_s)
        if old is not None and old.nuid != info.nuid:
            await self._purge_quietly(old.nuid)

    # reading

    async def get(self, name: str, *, timeout_s: float = READ_TIMEOUT_S) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                info = await self._info(name)
                while info is not None and not info.deleted:
                    try:
                        return b"".join([chunk async for chunk in self._whole(info, CHUNKS_PER_READ, timeout_s)])
                    except ObjectCorrupt:
                        before, info = info, await self._info(name)
                        if info is not None and not info.deleted and info.nuid == before.nuid:
                            raise  # otherwise it was replaced during the read, and its chunks are gone
                raise ObjectNotFound(f"there is no object {name!r} in {self.name}")
        except TimeoutError:
            raise RequestTimeout(f"object {name!r} of {self.name} was not read in {timeout_s} s") from None

    async def chunks(
        self, name: str, *, offset: int = 0, length: int | None = None, timeout_s: float = READ_TIMEOUT_S
    ) -> AsyncIterator[bytes]:
        info = await self._present(name)
        if offset < 0 or (length is not None and length < 0):
            raise ValueError(f"a range of object {name!r} begins at {offset} and has {length} bytes: neither can be negative")
        left = max(0, info.size - offset) if length is None else min(length, max(0, info.size - offset))
        if left == info.size:
            async for chunk in self._whole(info, CHUNKS_PER_STEP, timeout_s):
                yield chunk
            return
        sequences = self._sequences(info)
        skipped = offset // info.options.max_chunk_size if sequences else 0
        skip = offset - skipped * info.options.max_chunk_size
        wanted = -(-(skip + left) // info.options.max_chunk_size)
        async for chunk in self._read(info, sequences[skipped : skipped + wanted], CHUNKS_PER_STEP, timeout_s):
            if not left:
                return
            part = chunk[skip : skip + left]
            skip = max(0, skip - len(chunk))
            left -= len(part)
            if part:
                yield part
        if left:
            raise ObjectCorrupt(f"object {name!r} of {self.name} ends {left} bytes before the end of the wanted range")

    async def info(self, name: str) -> StoredObject:
        return (await self._present(name)).public()

    async def present(self, names: Sequence[str]) -> set[str]:
        subjects = {self._subjects.description(name): name for name in names}
        found = await self._session.reader.last_of_subjects(self._stream, list(subjects))
        return {info.name for info in self._readable(found) if not info.deleted}

    async def sweep(self, *, idle_s: float) -> int:
        reader = self._session.reader
        found = await reader.subject_counts(self._stream, self._subjects.all_chunks)
        if not found:
            return 0
        described = {self._subjects.chunks(info.nuid) for info in await self._infos()}
        removed = 0
        for subject in found.keys() - described:
            last = await reader.message(self._stream, last_of=subject)
            if last is None or await reader.age_s(self._stream, last) < idle_s or await self._has_description(subject, last):
                continue
            await purge_chunks(self._session, self._subjects, subject.rpartition(".")[2])
            removed += 1
        return removed

    async def _has_description(self, subject: str, chunk: StoredMessage) -> bool:
        """Read from the stream's leader whether an object owns a chunk. Without the name of its object it may have an owner."""
        name = (chunk.headers or {}).get(NAME_HEADER)
        if name is None:
            return True
        info = await self._info(decode_name(name))
        return info is not None and not info.deleted and self._subjects.chunks(info.nuid) == subject

    async def _whole(self, info: ObjectInfo, step: int, timeout_s: float) -> AsyncIterator[bytes]:
        """Read all chunks. Raises ObjectCorrupt at the end if size or digest differ from the description."""
        digest = hashlib.sha256()
        size = count = 0
        async for chunk in self._read(info, self._sequences(info), step, timeout_s):
            digest.update(chunk)
            size += len(chunk)
            count += 1
            yield chunk
        if size != info.size or count != info.chunks:
            raise ObjectCorrupt(
                f"object {info.name!r} of {self.name} has {size} bytes in {count} chunks, not {info.size} in {info.chunks}"
            )
        if info.sha256() not in (None, digest.digest()):
            raise ObjectCorrupt(f"object {info.name!r} of {self.name} does not have its digest {info.digest}")

    async def _read(self, info: ObjectInfo, sequences: list[int], step: int, timeout_s: float) -> AsyncIterator[bytes]:
        """Read the chunks with these sequences, or all of them where there is no index. Ends early if one is missing."""
        count = len(sequences) or info.chunks
        at, next_seq = 0, 1
        while at < count:
            wanted = sequences[at : at + step]
            size = min(step, count - at)
            page = await self._page(info.nuid, min(wanted, default=next_seq), size, timeout_s)
            if not page:
                return
            chunks = await self._in_order(info.nuid, page, wanted, timeout_s) if wanted else [m.data for m in page]
            for chunk in chunks:
                yield chunk
            if wanted and len(chunks) < len(wanted):
                return
            at += len(chunks)
            next_seq = page[-1].seq + 1
            await asyncio.sleep(0)  # hashing a page takes milliseconds; other tasks must run

    async def _in_order(self, nuid: str, page: list[StoredMessage], wanted: list[int], timeout_s: float) -> list[bytes]:
        """Return the chunks of a page in the order of the index; those that were stored out of order are read one by one."""
        found = {message.seq: message.data for message in page}
        chunks: list[bytes] = []
        for seq in wanted:
            if seq not in found:
                found |= {message.seq: message.data for message in await self._page(nuid, seq, 1, timeout_s)}
            if seq not in found:
                break
            chunks.append(found[seq])
        return chunks

    async def _page(self, nuid: str, seq: int, count: int, timeout_s: float) -> list[StoredMessage]:
        query = {"seq": seq, "next_by_subj": self._subjects.chunks(nuid), "batch": count}
        return await self._session.reader.batch(self._stream, query, timeout_s=timeout_s)

    # descriptions

    def _sequences(self, info: ObjectInfo) -> list[int]:
        try:
            return info.sequences()
        except ValueError as error:
            raise ObjectCorrupt(f"object {info.name!r} of {self.name}: {error}") from None

    async def _present(self, name: str) -> ObjectInfo:
        info = await self._info(name)
        if info is None or info.deleted:
            raise ObjectNotFound(f"there is no object {name!r} in {self.name}")
        return info

    async def _info(self, name: str) -> ObjectInfo | None:
        try:
            stored = await self._session.reader.message(self._stream, last_of=self._subjects.description(name))
        except TopologyError:
            raise TopologyError(f"there is no object store {self.name}") from None
        if stored is None:
            return None
        try:
            return msgspec.json.decode(stored.data, type=ObjectInfo)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ObjectCorrupt(f"the description of object {name!r} of {self.name} cannot be read: {error}") from error

    async def _infos(self) -> list[ObjectInfo]:
        found = await self._session.reader.last_of_each(self._stream, self._subjects.all_descriptions)
        return [info for info in self._readable(found) if not info.deleted]

    def _readable(self, descriptions: Sequence[StoredMessage]) -> Iterator[ObjectInfo]:
        for stored in descriptions:
            try:
                yield msgspec.json.decode(stored.data, type=ObjectInfo)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                log.warning("object.damaged", store=self.name, sequence=stored.seq, error=str(error))

    async def _purge_quietly(self, nuid: str) -> None:
        """Remove chunks that no description refers to. A failure wastes space and is no error."""
        with contextlib.suppress(JetStreamError):
            await purge_chunks(self._session, self._subjects, nuid)

    async def list(self, prefix: str = "") -> list[StoredObject]:
        return [
            info.public() for info in await self._infos() if info.name.startswith(prefix)
        ]  # at the end, as annotations behind it would mean this method
