"""Defines the requests and answers of the routes over files and uploads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.broker.files.records import FileRecord, UploadRecord
from headrace.frontend.schema.stored import ExpiresAfter, Page

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]


class FileObject(msgspec.Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None

    @classmethod
    def of(cls, record: FileRecord) -> FileObject:
        """Return a file as clients see it."""
        return cls(
            id=record.id,
            bytes=record.bytes,
            created_at=int(record.created),
            expires_at=None if record.expires is None else int(record.expires),
            filename=record.filename,
            purpose=record.purpose,
        )


class FileList(Page, kw_only=True):
    """A page of files."""

    data: list[FileObject]


class DeletedFile(msgspec.Struct, kw_only=True):
    """A file that was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class NewUpload(msgspec.Struct, kw_only=True):
    """A file to be uploaded in parts."""

    bytes: Annotated[int, Meta(ge=0)]
    filename: str
    mime_type: Annotated[str, Meta(max_length=255)]
    purpose: str
    expires_after: ExpiresAfter | None = None


class UploadCompletion(msgspec.Struct, kw_only=True):
    """The parts of a file, in order."""

    part_ids: Annotated[list[str], Meta(max_length=10_000)]
    md5: str | None = None


class UploadObject(msgspec.Struct, kw_only=True):
    """An upload. `file`: once it is completed."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None = None

    @classmethod
    def of(cls, record: UploadRecord, file: FileRecord | None = None) -> UploadObject:
        """Return an upload as clients see it."""
        return cls(
            id=record.id,
            bytes=record.bytes,
            created_at=int(record.created),
            expires_at=int(record.expires),
            filename=record.filename,
            purpose=record.purpose,
            status=record.status,
            file=None if file is None else FileObject.of(file),
        )


class UploadPart(msgspec.Struct, kw_only=True):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


SCHEMAS: tuple[Any, ...] = (
    FileObject,
    FileList,
    DeletedFile,
    NewUpload,
    UploadCompletion,
    UploadObject,
    UploadPart,
)
