"""Stores files of tenants: a record in the bucket `<prefix>_files`, the content in the object store of the same name.

The record decides whether a file is there.  A file that is being written has a record that reserves its bytes; it is written
before the usage of the tenant is added up, so that two files that fit only one at a time never both pass.  Content without a
record is removed by `headrace.broker.files.store`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec
import structlog

from headrace.base.metrics import Counter
from headrace.broker.dead_letters import note_failure
from headrace.broker.files.errors import FileError, FileInvalid, FileNotStored, FileQuotaExceeded, FileUnknown
from headrace.broker.files.records import (
    FileLimits,
    FileRecord,
    UploadRecord,
    file_key,
    is_file_id,
    life_of,
    new_file_id,
    room_for,
    usage_of,
)
from headrace.jetstream.errors import JetStreamError, ObjectCorrupt, ObjectNotFound, RevisionConflict, SubjectError
from headrace.jetstream.ports import Bucket, Messaging, ObjectBucket, ObjectWriter
from headrace.jetstream.subjects import Subjects, check_token

WRITTEN = Counter(
    "headrace_files_written_total", "Files by purpose and outcome: stored, left, or an error", ["purpose", "outcome"]
)
WRITTEN_BYTES = Counter("headrace_files_written_bytes_total", "Bytes of files taken from clients and makers")
READ_BYTES = Counter("headrace_files_read_bytes_total", "Bytes of files read from the store")
UPLOADS = Counter("headrace_files_uploads_total", "Uploads in parts by what was done with them", ["what"])
SWEPT = Counter("headrace_files_swept_total", "Leftovers removed: chunks of dead writers, contents without a record", ["what"])


LONGEST_WRITE_S = 3600.0
RESERVED_S = LONGEST_WRITE_S + 300.0
FORGET_DELETED_S = 60.0
MAX_LISTED = 10_000
LONGEST_OUTAGE_S = 30.0  # of the server, in the middle of a read
READ_AGAIN_S = 0.5

_record = msgspec.json.Decoder(FileRecord)
_upload = msgspec.json.Decoder(UploadRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDraft:
    """A file to be written. `life_s`: for how long it is kept; None = the rule of its purpose.

    An empty purpose is not known yet and given with the commit. `announced`: the most bytes that it can have, if known.
    `beside_upload`: the upload that has reserved the bytes. `file_id`: an id that no other file has; empty = a new one.
    """

    tenant: str
    filename: str
    purpose: str = ""
    life_s: int | None = None
    announced: int | None = None
    origin: str = ""
    beside_upload: str = ""
    file_id: str = ""


@dataclass(frozen=True, slots=True)
class FilePage:
    """Files of a list, in order. `more`: others follow."""

    files: Sequence[FileRecord]
    more: bool


class FileStore:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        limits: FileLimits | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits or FileLimits()
        self._records: Bucket = messaging.bucket(subjects.bucket("files"))
        self._objects: ObjectBucket = messaging.objects(subjects.bucket("files"))
        self._now = now

    def writer(self, draft: FileDraft) -> FileWriter:
        """Write a file piece by piece, as an async context manager. It is there with the commit, and not at all without.

        Entering raises FileTooLarge, FileQuotaExceeded, or a JetStreamError.
        """
        return FileWriter(self, draft, self._records, self._objects, self._now)

    async def create(self, draft: FileDraft, data: AsyncIterator[bytes]) -> FileRecord:
        """Store a file from a stream of pieces. Raises as `FileWriter` does, and as the stream does."""
        async with self.writer(draft) as writer:
            async for piece in data:
                await writer.write(piece)
            return await writer.commit()

    async def get(self, file_id: str, tenant: str) -> FileRecord:
        entry = await self._records.get(file_key(check_token(tenant, "tenant"), file_id)) if is_file_id(file_id) else None
        record = _record.decode(entry.value) if entry is not None else None
        if record is None or not self._is_there(record):
            raise FileUnknown(file_id)
        return record

    async def read(self, record: FileRecord, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Read a file, or a range of its bytes, piece by piece. A read that has begun waits for a server that is away.

        Raises FileUnknown, or a JetStreamError.
        """
        at, left, until_s = offset, length, 0.0
        while True:
            try:
                async for chunk in self._objects.chunks(record.object_name, offset=at, length=left):
                    at, left, until_s = at + len(chunk), None if left is None else left - len(chunk), 0.0
                    READ_BYTES.inc(len(chunk))
                    yield chunk
                return
            except ObjectNotFound:  # it has expired or was deleted just now
                raise FileUnknown(record.id) from None
            except JetStreamError as error:
                now_s = time.monotonic()
                until_s = until_s or now_s + LONGEST_OUTAGE_S
                if isinstance(error, ObjectCorrupt) or at == offset or now_s > until_s:
                    raise
                log.info("file.read_again", file=record.id, offset=at, error=str(error))
                await asyncio.sleep(READ_AGAIN_S)

    async def delete(self, file_id: str, tenant: str) -> None:
        record = await self.get(file_id, tenant)
        await self._records.delete(record.key)
        await self._objects.delete(record.object_name, ttl_s=FORGET_DELETED_S)

    async def page(
        self,
        tenant: str,
        *,
        purpose: str | None = None,
        limit: int = MAX_LISTED,
        ascending: bool = False,
        after: str | None = None,
    ) -> FilePage:
        """List files of a tenant by the time of their creation. Raises FileInvalid for an `after` that is not in the list."""
        files = [record for record in await self._of_tenant(tenant) if self._is_there(record)]
        found = sorted(
            (record for record in files if purpose is None or record.purpose == purpose),
            key=lambda record: (record.created, record.id),
            reverse=not ascending,
        )
        if after is not None:
            ids = [record.id for record in found]
            if after not in ids:
                raise FileInvalid(f"after: the list has no file {after[:100]!r}", param="after")
            found = found[ids.index(after) + 1 :]
        return FilePage(found[:limit], len(found) > limit)

    async def room_for(self, draft: FileDraft, own_id: str) -> int | None:
        """Return the most bytes that a file may have beside all others of its tenant. Raises as `quota.room_for`."""
        files = [record for record in await self._of_tenant(draft.tenant) if record.id != own_id]
        entries = await self._records.entries(f"upload.{draft.tenant}.*")
        uploads = [_upload.decode(entry.value) for entry in entries]
        others = usage_of(files, (upload for upload in uploads if upload.id != (draft.beside_upload or own_id)), self._now())
        return room_for(self.limits, others, announced=draft.announced, purpose=draft.purpose or None)

    async def _of_tenant(self, tenant: str) -> list[FileRecord]:
        entries = await self._records.entries(f"file.{check_token(tenant, 'tenant')}.*")
        return [_record.decode(entry.value) for entry in entries]

    def _is_there(self, record: FileRecord) -> bool:
        return record.status != "uploading" and (record.expires is None or record.expires > self._now())


class FileWriter:
    def __init__(
        self, store: FileStore, draft: FileDraft, records: Bucket, objects: ObjectBucket, now: Callable[[], float]
    ) -> None:
        self.id = draft.file_id or new_file_id()
        self._store = store
        self._draft = draft
        self._records = records
        self._objects = objects
        self._now = now
        self._created = now()
        self._room: int | None = None
        self._revision = 0
        self._committed = False
        self._content: ObjectWriter

    async def __aenter__(self) -> FileWriter:
        draft, limits = self._draft, self._store.limits
        check_token(draft.tenant, "tenant")
        reserved = draft.announced if draft.announced is not None else limits.of_purpose(draft.purpose or None) or 0
        record = self._record(reserved, draft.purpose, None)
        self._revision = await self._records.create(record.key, msgspec.json.encode(record), ttl_s=RESERVED_S)
        try:
            self._room = await self._store.room_for(draft, self.id)
        except BaseException as error:
            await self._give_up(error)
            raise
        life_s = life_of(draft.purpose, draft.life_s) if draft.purpose else None
        content = self._objects.writer(record.object_name, ttl_s=life_s)
        self._content = await content.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._content.__aexit__(kind, error, trace)
        if not self._committed:
            with contextlib.suppress(JetStreamError):
                await self._objects.delete(f"{self._draft.tenant}/{self.id}", ttl_s=FORGET_DELETED_S)
            await self._give_up(error)

    @property
    def size(self) -> int:
        return self._content.size

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes, and wait while many are on their way. Raises FileTooLarge, FileQuotaExceeded, a JetStreamError."""
        size = self._content.size + len(data)
        self._check(size, self._draft.purpose)
        WRITTEN_BYTES.inc(len(data))
        await self._content.write(data)

    async def commit(self, *, purpose: str = "", life_s: int | None = None) -> FileRecord:
        """Store the file. `purpose` and `life_s` where the draft has none. Raises as `write` does, and FileNotStored."""
        draft = self._draft
        purpose = draft.purpose or purpose
        self._check(self._content.size, purpose)
        kept_s = life_of(purpose, draft.life_s if draft.life_s is not None else life_s)
        stored = await self._content.commit(metadata={"filename": draft.filename, "purpose": purpose})
        record = self._record(stored.size, purpose, None if kept_s is None else self._created + kept_s, sha256=stored.digest)
        left_s = None if record.expires is None else max(1.0, record.expires - self._now())
        try:
            await self._records.update(record.key, msgspec.json.encode(record), revision=self._revision, ttl_s=left_s)
        except RevisionConflict:
            raise FileNotStored(f"the reservation of file {self.id} was lost while it was written") from None
        self._committed = True
        WRITTEN.labels(purpose, "stored").inc()
        return record

    def _check(self, size: int, purpose: str) -> None:
        self._store.limits.check_size(size, purpose or None)
        if self._room is not None and size > self._room:
            raise FileQuotaExceeded(f"with this file there would be more than {self._store.limits.tenant_bytes} bytes in files")
        if self._now() - self._created > LONGEST_WRITE_S:
            raise FileNotStored(f"the file was not complete after {LONGEST_WRITE_S:.0f} s")

    def _record(self, size: int, purpose: str, expires: float | None, sha256: str = "") -> FileRecord:
        draft = self._draft
        return FileRecord(
            id=self.id,
            tenant=draft.tenant,
            bytes=size,
            created=self._created,
            filename=draft.filename,
            purpose=purpose,
            expires=expires,
            status="processed" if sha256 else "uploading",
            sha256=sha256,
            origin=draft.origin,
        )

    async def _give_up(self, error: BaseException | None) -> None:
        """Remove the reservation; one that stays expires by itself."""
        reason = type(error).__name__ if isinstance(error, FileError | JetStreamError) else "left"
        WRITTEN.labels(self._draft.purpose or "unknown", reason).inc()
        with contextlib.suppress(JetStreamError):
            await self._records.delete(file_key(self._draft.tenant, self.id))


# Removes what dead processes left in the store of files: chunks that never became an object, and contents without a record.
#
# Any number of frontends may sweep at once. Content is removed only if it is older than any write may take, and if a read
# from the leader shows no record of it.

log = structlog.get_logger()

SWEEP_S = 600.0
CHUNKS_IDLE_S = 3600.0
ORPHAN_S = 2 * LONGEST_WRITE_S


class FileSweeper:
    def __init__(self, messaging: Messaging, subjects: Subjects, *, now: Callable[[], float] = time.time) -> None:
        self._records: Bucket = messaging.bucket(subjects.bucket("files"))
        self._objects: ObjectBucket = messaging.objects(subjects.bucket("files"))
        self._now = now

    async def run(self) -> None:
        """Sweep until cancelled. The first time is chosen at random, so that frontends take turns."""
        await asyncio.sleep(SWEEP_S * random.random())  # noqa: S311  # it spreads the load
        while True:
            try:
                await self.sweep()
            except JetStreamError as error:  # the next sweep tries again
                log.warning("files.not_swept", error=str(error))
            except Exception as error:  # an object that nothing foresaw must not end the frontend
                note_failure("file", error)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> int:
        """Remove what is left over. Returns the number of things removed. Raises a JetStreamError."""
        chunks = await self._objects.sweep(idle_s=CHUNKS_IDLE_S)
        contents = await self._drop_contents()
        for what, count in (("chunks", chunks), ("contents", contents)):
            SWEPT.labels(what).inc(count)
        if chunks or contents:
            log.info("files.swept", chunks=chunks, contents=contents)
        return chunks + contents

    async def _drop_contents(self) -> int:
        known = {entry.key for entry in await self._records.entries("file.>")}
        removed = 0
        for found in await self._objects.list():
            tenant, _, file_id = found.name.partition("/")
            if not is_file_id(file_id):  # a part of an upload, which expires by itself
                continue
            try:
                key = file_key(tenant, file_id)
            except SubjectError as error:  # no object of ours, and it must not keep the sweep from the others
                log.warning("file.unknown_object", error=str(error)[:300])
                continue
            if key in known or self._now() - found.stored < ORPHAN_S or await self._records.get(key) is not None:
                continue
            await self._objects.delete(found.name, ttl_s=FORGET_DELETED_S)
            removed += 1
        return removed
