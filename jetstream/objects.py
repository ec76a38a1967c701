"""Object stores in a stream, in the layout of ADR-20 plus two additions that other clients ignore.

An object is a number of chunk messages under one subject, and a description under another that is written after them. The
description of an object with several chunks has an index of their stream sequences in its metadata, so that a range is read
without what lies before it. Each chunk has a header with the object's name, so that a sweep can look for the description.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import secrets
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType

import msgspec
import structlog

from headrace.jetstream import wire
from headrace.jetstream.direct_get import ServerSession
from headrace.jetstream.errors import JetStreamError, ObjectCorrupt, ObjectError, ObjectNotFound, RequestTimeout, TopologyError
from headrace.jetstream.ports import PubAck, StoredMessage, StoredObject

CHUNK = 128 * 1024
NAME_HEADER = "Headrace-Object"
INDEX = "headrace-index"  # the key of the metadata

_DIGEST = "SHA-256="


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
    metadata: dict[str, str] = {}
    options: _Options = msgspec.field(default_factory=_Options)

    def sequences(self) -> list[int]:
        """Return the stream sequences of the chunks, in order; empty if the description has no index."""
        text = self.metadata.get(INDEX)
        return decode_index(text) if text else []

    def sha256(self) -> bytes | None:
        _, _, stored = self.digest.partition("=")
        return base64.urlsafe_b64decode(stored + "=" * (-len(stored) % 4)) if stored else None

    def public(self) -> StoredObject:
        """Return the description as users of the store see it."""
        return StoredObject(
            name=self.name,
            size=self.size,
            digest=(self.sha256() or b"").hex(),
            stored=datetime.fromisoformat(self.mtime).timestamp() if self.mtime else 0.0,
            metadata={key: value for key, value in self.metadata.items() if key != INDEX},
        )


class ObjectSubjects:
    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.stream = f"OBJ_{bucket}"
        self.all_chunks = f"$O.{bucket}.C.*"
        self.all_descriptions = f"$O.{bucket}.M.*"

    def chunks(self, nuid: str) -> str:
        return f"$O.{self.bucket}.C.{nuid}"

    def description(self, name: str) -> str:
        return f"$O.{self.bucket}.M.{encode_name(name)}"


def encode_name(name: str) -> str:
    """Return the name of an object as a token of a subject, and as the value of a header."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def decode_name(token: str) -> str:
    """Decode `encode_name`. Raises ValueError."""
    return base64.urlsafe_b64decode(token).decode()


def encode_digest(digest: bytes) -> str:
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()


def encode_index(sequences: Sequence[int]) -> str:
    """Return stream sequences as text: compressed differences, a few bytes for chunks that lie side by side."""
    raw = bytearray()
    last = 0
    for sequence in sequences:
        step = sequence - last
        last = sequence
        number = step << 1 if step >= 0 else (-step << 1) - 1
        while number >= 0x80:
            raw.append(number & 0x7F | 0x80)
            number >>= 7
        raw.append(number)
    return base64.b64encode(zlib.compress(bytes(raw), 9)).decode()


def decode_index(text: str) -> list[int]:
    """Decode `encode_index`. Raises ValueError for malformed text."""
    try:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"an index of chunks cannot be read: {error}") from None
    sequences: list[int] = []
    last = number = shift = 0
    for byte in raw:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            last += number >> 1 if not number & 1 else -((number + 1) >> 1)
            sequences.append(last)
            number = shift = 0
    if shift:
        raise ValueError("an index of chunks ends in the middle of a number")
    return sequences


def stored_now() -> str:
    return datetime.now(UTC).isoformat()


CHUNKS_IN_FLIGHT = 16
WRITE_TIMEOUT_S = 10.0
ABANDON_TIMEOUT_S = 2.0
CHUNKS_OUTLIVE_S = 2.0
LONGEST_PAUSE_S = 900.0  # between two chunks, or the last one and the commit: well below what a sweep waits


class ChunkWriter:
    """Writes an object piece by piece; implements `ports.ObjectWriter`. Up to 16 chunks of 128 KiB wait for their acks.

    Chunks are written before the description, so that an object is there whole or not at all. A writer that is left without a
    commit removes its chunks; `ObjectStore.sweep` removes those of a dead process.
    """

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
        """Add bytes; waits while 16 chunks are in flight. Raises a JetStreamError, after which nothing can be stored."""
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
        """Wait for all chunks and write the description, which makes the object visible."""
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


log = structlog.get_logger(__name__)

CHUNKS_PER_READ = 48  # 6 MiB per round trip
CHUNKS_PER_STEP = 16  # of a reader that takes the object piece by piece
READ_TIMEOUT_S = 30.0


class ObjectStore:
    """An object store in the layout of ADR-20, so that `nats object ls|get|put` work; implements `ports.ObjectBucket`.

    Chunks are read in pages by direct batch reads: this leaves no consumer behind, joins chunks in linear time, and has a
    deadline. Size and digest are checked.
    """

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
        """Read from the stream's leader whether an object owns a chunk. A chunk without an object name counts as owned."""
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
        """Read the chunks with these sequences, or all of them if there is no index. Ends early if one is missing."""
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
        """Remove chunks that no description refers to. A failure wastes space and is not an error."""
        with contextlib.suppress(JetStreamError):
            await purge_chunks(self._session, self._subjects, nuid)

    async def list(self, prefix: str = "") -> list[StoredObject]:
        return [
            info.public() for info in await self._infos() if info.name.startswith(prefix)
        ]  # at the end, as annotations behind it would mean this method
