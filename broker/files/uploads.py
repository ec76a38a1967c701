"""Stores files that are uploaded in parts, which lie in the object store until the upload is completed, cancelled or expired.

The file of a completed upload is the parts joined in the order given.  An upload ends once: its record is changed at the
revision that was read before the decision, and the file of a completion that came second is deleted again.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from headrace.broker.files import store
from headrace.broker.files.errors import (
    FileInvalid,
    FileNotStored,
    FileQuotaExceeded,
    FileTooLarge,
    FileUnknown,
    UploadClosed,
    UploadUnknown,
)
from headrace.broker.files.records import (
    UPLOAD_LIFE_S,
    UPLOAD_REMEMBERED_S,
    FileRecord,
    PartRecord,
    UploadRecord,
    is_part_id,
    is_upload_id,
    new_part_id,
    new_upload_id,
    part_prefix,
    upload_key,
)
from headrace.broker.files.store import FORGET_DELETED_S, FileDraft, FileStore
from headrace.jetstream.errors import JetStreamError, ObjectNotFound, RevisionConflict
from headrace.jetstream.ports import Entry, Messaging, ObjectBucket
from headrace.jetstream.subjects import Subjects, check_token

PART_LIFE_S = UPLOAD_LIFE_S + 600.0  # a completion reads the parts for a while

_upload = msgspec.json.Decoder(UploadRecord)
_part = msgspec.json.Decoder(PartRecord)


class UploadStore:
    def __init__(
        self, messaging: Messaging, subjects: Subjects, files: FileStore, *, now: Callable[[], float] = time.time
    ) -> None:
        self.limits = files.limits
        self.files = files
        self._records = messaging.bucket(subjects.bucket("files"))
        self._objects: ObjectBucket = messaging.objects(subjects.bucket("files"))
        self._now = now

    async def create(self, draft: FileDraft, *, size: int, mime_type: str) -> UploadRecord:
        """Open an upload, which reserves its bytes for an hour. Raises FileTooLarge, FileQuotaExceeded."""
        self.limits.check_size(size, draft.purpose)
        record = UploadRecord(
            id=new_upload_id(),
            tenant=check_token(draft.tenant, "tenant"),
            bytes=size,
            created=self._now(),
            filename=draft.filename,
            purpose=draft.purpose,
            mime_type=mime_type,
            life_s=draft.life_s,
        )
        await self._records.create(record.key, msgspec.json.encode(record), ttl_s=UPLOAD_REMEMBERED_S)
        try:
            room = await self.files.room_for(draft, record.id)
            if room is not None and size > room:
                raise FileQuotaExceeded(
                    f"{size} bytes more would be over the quota of {self.limits.tenant_bytes} bytes in files"
                )
        except BaseException:
            with contextlib.suppress(JetStreamError):
                await self._records.delete(record.key)
            raise
        store.UPLOADS.labels("created").inc()
        return record

    async def get(self, upload_id: str, tenant: str) -> UploadRecord:
        return _upload.decode((await self._entry(upload_id, tenant)).value)

    async def open(self, upload_id: str, tenant: str) -> UploadRecord:
        """Return an upload that takes parts. Raises UploadUnknown, UploadClosed."""
        return self._still_open(_upload.decode((await self._entry(upload_id, tenant)).value))

    async def add_part(self, upload: UploadRecord, data: AsyncIterator[bytes]) -> PartRecord:
        """Store a part of an open upload. Raises FileTooLarge, UploadClosed, and as `data` does."""
        stored = await self._parts(upload)
        if len(stored) >= self.limits.parts:
            raise FileTooLarge(f"upload {upload.id} has {len(stored)} parts already; {self.limits.parts} are possible")
        before = sum(part.bytes for part in stored.values())
        part_id = new_part_id()
        name = f"{upload.tenant}/{upload.id}/{part_id}"
        async with self._objects.writer(name, ttl_s=PART_LIFE_S) as writer:
            async for piece in data:
                self._check_part(upload, before, writer.size + len(piece))
                store.WRITTEN_BYTES.inc(len(piece))
                await writer.write(piece)
            await writer.commit()
        part = PartRecord(id=part_id, tenant=upload.tenant, upload_id=upload.id, bytes=writer.size, created=self._now())
        try:
            await self.open(upload.id, upload.tenant)
            await self._records.create(part.key, msgspec.json.encode(part), ttl_s=PART_LIFE_S)
        except BaseException:
            with contextlib.suppress(JetStreamError):
                await self._objects.delete(name, ttl_s=FORGET_DELETED_S)
            raise
        return part

    async def complete(
        self, upload_id: str, tenant: str, part_ids: Sequence[str], *, md5: str | None = None
    ) -> tuple[UploadRecord, FileRecord]:
        """Make a file of the parts, in this order. A completed upload is returned again, so that the call can be repeated.

        Raises UploadUnknown, UploadClosed, FileInvalid (an unknown part, other bytes than announced), and as a file is written.
        """
        entry = await self._entry(upload_id, tenant)
        upload = _upload.decode(entry.value)
        if upload.status == "completed":
            return upload, await self.files.get(upload.file_id, tenant)
        self._still_open(upload)
        parts = self._chosen(await self._parts(upload), part_ids)
        total = sum(part.bytes for part in parts)
        if total != upload.bytes:
            raise FileInvalid(
                f"the parts have {total} bytes together; the upload was announced with {upload.bytes}", param="part_ids"
            )
        draft = FileDraft(
            tenant=tenant,
            filename=upload.filename,
            purpose=upload.purpose,
            life_s=upload.life_s,
            announced=total,
            beside_upload=upload.id,
        )
        digest = hashlib.md5(usedforsecurity=False)
        async with self.files.writer(draft) as writer:
            async for piece in self._joined(parts):
                digest.update(piece)
                await writer.write(piece)
            if md5 is not None and digest.hexdigest() != md5.lower():
                raise FileInvalid(f"the parts have the md5 checksum {digest.hexdigest()}, not {md5[:100]!r}", param="md5")
            file = await writer.commit()
        done = msgspec.structs.replace(upload, status="completed", file_id=file.id)
        try:
            await self._change(done, entry)
        except UploadClosed:
            with contextlib.suppress(FileUnknown, JetStreamError):
                await self.files.delete(file.id, tenant)
            raise
        await self._drop_parts(done)
        store.UPLOADS.labels("completed").inc()
        return done, file

    async def cancel(self, upload_id: str, tenant: str) -> UploadRecord:
        """Cancel an upload; a cancelled one is returned again. Raises UploadUnknown, UploadClosed."""
        entry = await self._entry(upload_id, tenant)
        upload = _upload.decode(entry.value)
        if upload.status == "cancelled":
            return upload
        self._still_open(upload)
        done = msgspec.structs.replace(upload, status="cancelled")
        await self._change(done, entry)
        await self._drop_parts(done)
        store.UPLOADS.labels("cancelled").inc()
        return done

    async def _entry(self, upload_id: str, tenant: str) -> Entry:
        key = upload_key(check_token(tenant, "tenant"), upload_id)
        entry = await self._records.get(key) if is_upload_id(upload_id) else None
        if entry is None:
            raise UploadUnknown(upload_id)
        return entry

    def _still_open(self, upload: UploadRecord) -> UploadRecord:
        status = upload.status_at(self._now())
        if status != "pending":
            raise UploadClosed(upload.id, status)
        return upload

    async def _change(self, upload: UploadRecord, entry: Entry) -> None:
        """Change a record at the revision that was read. Raises UploadClosed if another change was first."""
        left_s = max(1.0, upload.created + UPLOAD_REMEMBERED_S - self._now())
        try:
            await self._records.update(entry.key, msgspec.json.encode(upload), revision=entry.revision, ttl_s=left_s)
        except RevisionConflict:
            stands = await self.get(upload.id, upload.tenant)
            raise UploadClosed(upload.id, stands.status_at(self._now())) from None

    async def _parts(self, upload: UploadRecord) -> dict[str, PartRecord]:
        entries = await self._records.entries(f"{part_prefix(upload.tenant, upload.id)}.*")
        return {part.id: part for part in (_part.decode(entry.value) for entry in entries)}

    def _chosen(self, parts: dict[str, PartRecord], part_ids: Sequence[str]) -> list[PartRecord]:
        if not part_ids:
            raise FileInvalid("part_ids: an upload is completed by at least one part", param="part_ids")
        for part_id in part_ids:
            if not is_part_id(part_id) or part_id not in parts:
                raise FileInvalid(f"part_ids: the upload has no part {part_id[:100]!r}", param="part_ids")
        return [parts[part_id] for part_id in part_ids]

    async def _joined(self, parts: Sequence[PartRecord]) -> AsyncIterator[bytes]:
        for part in parts:
            try:
                async for piece in self._objects.chunks(part.object_name):
                    yield piece
            except ObjectNotFound:
                raise FileNotStored(f"part {part.id} has expired") from None

    def _check_part(self, upload: UploadRecord, before: int, size: int) -> None:
        """Check a part that has grown. All parts may have twice the bytes of the file: some are uploaded again."""
        if size > self.limits.part_bytes:
            raise FileTooLarge(f"the part has {size} bytes or more; a part may have {self.limits.part_bytes}")
        if before + size > 2 * upload.bytes:
            raise FileTooLarge(
                f"with this part upload {upload.id} would have more than twice the {upload.bytes} bytes that were announced"
            )

    async def _drop_parts(self, upload: UploadRecord) -> None:
        """Remove the parts of an upload that has ended. Those that stay expire by themselves."""
        with contextlib.suppress(JetStreamError):
            for part in (await self._parts(upload)).values():
                await self._records.delete(part.key)
                await self._objects.delete(part.object_name, ttl_s=FORGET_DELETED_S)
