"""Decides whether a tenant may store a file: limits on one file, on the number of files and on their bytes together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.broker.files.errors import FileQuotaExceeded, FileTooLarge
from headrace.broker.files.records import OUTPUT_PURPOSES, FileRecord, UploadRecord

MIB = 1024 * 1024
SLACK = 64 * 1024  # a client that announces a body announces the form around the file, too


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """Limits on files of clients. What the server makes itself counts, and is never refused."""

    file_bytes: int = 512 * MIB
    batch_bytes: int = 200 * MIB
    tenant_files: int = 10_000
    tenant_bytes: int = 10 * 1024 * MIB
    part_bytes: int = 64 * MIB
    parts: int = 1024  # of one upload

    def of_purpose(self, purpose: str | None) -> int | None:
        """Return the most bytes of a file; None = no limit. The largest limit while the purpose is not known."""
        if purpose in OUTPUT_PURPOSES:
            return None
        return self.batch_bytes if purpose == "batch" else self.file_bytes

    def check_size(self, size: int, purpose: str | None) -> None:
        """Raise FileTooLarge if a file of a purpose must not have so many bytes."""
        most = self.of_purpose(purpose)
        if most is not None and size > most:
            kind = f" with purpose {purpose}" if purpose else ""
            raise FileTooLarge(f"the file has {size} bytes or more; a file{kind} may have {most}")


@dataclass(frozen=True, slots=True)
class FileUsage:
    """The number and the bytes of files that a tenant has stored or reserved."""

    files: int
    bytes: int


def usage_of(files: Iterable[FileRecord], uploads: Iterable[UploadRecord], now: float) -> FileUsage:
    """Add up files, also those that are being uploaded, and what open uploads will have."""
    sizes = [record.bytes for record in files if record.expires is None or record.expires > now]
    sizes += [upload.bytes for upload in uploads if upload.status_at(now) == "pending"]
    return FileUsage(len(sizes), sum(sizes))


def room_for(limits: FileLimits, others: FileUsage, *, announced: int | None, purpose: str | None) -> int | None:
    """Return the most bytes that a new file may have beside all others; None = no limit.

    `announced` may be a little more than the file has. Raises FileQuotaExceeded, FileTooLarge.
    """
    most = limits.of_purpose(purpose)
    if most is None:
        return None
    if others.files >= limits.tenant_files:
        raise FileQuotaExceeded(f"there are {others.files} files and uploads; {limits.tenant_files} may be kept. Delete some")
    least = max(0, (announced or 0) - SLACK)
    limits.check_size(least, purpose)
    room = limits.tenant_bytes - others.bytes
    if room <= 0 or least > room:
        raise FileQuotaExceeded(
            f"the files have {others.bytes} bytes together, and uploads reserve theirs; {limits.tenant_bytes} may be kept. "
            "Delete some, or wait until they expire"
        )
    return min(most, room)
