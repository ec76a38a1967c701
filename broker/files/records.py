"""Records of files, uploads and their parts, with the rules of purposes, expiry and quotas."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.broker.files.errors import FileInvalid, FileQuotaExceeded, FileTooLarge
from headrace.broker.jobs import new_id

DAY_S = 86_400
INPUT_PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
OUTPUT_PURPOSES = ("batch_output",)
EXPIRING = {"batch": 30 * DAY_S, "batch_output": 30 * DAY_S}  # where no expiry is asked for
SHORTEST_LIFE_S = 3600
LONGEST_LIFE_S = 30 * DAY_S
LONGEST_FILENAME = 255
UPLOAD_LIFE_S = 3600
UPLOAD_REMEMBERED_S = DAY_S  # so that a late part is told why it is refused

_FILE_ID = re.compile(r"file-[A-Za-z0-9]{1,58}\Z")
_UPLOAD_ID = re.compile(r"upload_[A-Za-z0-9]{1,56}\Z")
_PART_ID = re.compile(r"part_[A-Za-z0-9]{1,58}\Z")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of a tenant. `uploading`: the bytes are those reserved for it. Times are Unix times; `expires` None = never.

    `origin` names what made an output file, a batch say.
    """

    id: str
    tenant: str
    bytes: int
    created: float
    filename: str
    purpose: str
    expires: float | None = None
    status: Literal["uploading", "processed"] = "processed"
    sha256: str = ""
    origin: str = ""

    @property
    def key(self) -> str:
        return file_key(self.tenant, self.id)

    @property
    def object_name(self) -> str:
        return f"{self.tenant}/{self.id}"


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file that is uploaded in parts. `bytes`: those that the file will have."""

    id: str
    tenant: str
    bytes: int
    created: float
    filename: str
    purpose: str
    mime_type: str
    life_s: int | None = None  # of the file, as it was asked for
    status: Literal["pending", "completed", "cancelled"] = "pending"
    file_id: str = ""

    @property
    def expires(self) -> float:
        return self.created + UPLOAD_LIFE_S

    @property
    def key(self) -> str:
        return upload_key(self.tenant, self.id)

    def status_at(self, now: float) -> Literal["pending", "completed", "cancelled", "expired"]:
        return "expired" if self.status == "pending" and now >= self.expires else self.status


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    upload_id: str
    bytes: int
    created: float

    @property
    def key(self) -> str:
        return f"{part_prefix(self.tenant, self.upload_id)}.{self.id}"

    @property
    def object_name(self) -> str:
        return f"{self.tenant}/{self.upload_id}/{self.id}"


def new_file_id() -> str:
    return f"file-{new_id()}"


def new_upload_id() -> str:
    return f"upload_{new_id()}"


def new_part_id() -> str:
    return f"part_{new_id()}"


def is_file_id(text: str) -> bool:
    return _FILE_ID.match(text) is not None


def is_upload_id(text: str) -> bool:
    return _UPLOAD_ID.match(text) is not None


def is_part_id(text: str) -> bool:
    return _PART_ID.match(text) is not None


def file_key(tenant: str, file_id: str) -> str:
    return f"file.{tenant}.{file_id}"


def upload_key(tenant: str, upload_id: str) -> str:
    return f"upload.{tenant}.{upload_id}"


def part_prefix(tenant: str, upload_id: str) -> str:
    return f"part.{tenant}.{upload_id}"


def check_purpose(purpose: str) -> str:
    """Return a purpose that clients may give. Raises FileInvalid."""
    if purpose not in INPUT_PURPOSES:
        shown = ", ".join(f"'{one}'" for one in INPUT_PURPOSES)
        raise FileInvalid(f"'{purpose[:100]}' is not one of [{shown}] - 'purpose'", param="purpose")
    return purpose


def check_filename(name: str) -> str:
    """Return the name of a file without folders. Raises FileInvalid for an empty, too long or unprintable one."""
    last = name.replace("\\", "/").rpartition("/")[2]
    if not last or len(last) > LONGEST_FILENAME or not last.isprintable():
        raise FileInvalid(
            f"a file needs a name of 1 to {LONGEST_FILENAME} printable characters, got {name[:100]!r}", param="file"
        )
    return last


def check_life(anchor: str | None, seconds: int | None) -> int | None:
    """Return for how long after its creation a file was asked to be kept. Raises FileInvalid."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise FileInvalid(f"expires_after.anchor must be 'created_at', got {anchor!r}", param="expires_after.anchor")
    if seconds is None or not SHORTEST_LIFE_S <= seconds <= LONGEST_LIFE_S:
        raise FileInvalid(
            f"expires_after.seconds must be from {SHORTEST_LIFE_S} to {LONGEST_LIFE_S}, got {seconds}",
            param="expires_after.seconds",
        )
    return seconds


def life_of(purpose: str, asked_s: int | None) -> int | None:
    return asked_s if asked_s is not None else EXPIRING.get(purpose)


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
        most = self.of_purpose(purpose)
        if most is not None and size > most:
            kind = f" with purpose {purpose}" if purpose else ""
            raise FileTooLarge(f"the file has {size} bytes or more; a file{kind} may have {most}")


@dataclass(frozen=True, slots=True)
class FileUsage:
    files: int
    bytes: int


def usage_of(files: Iterable[FileRecord], uploads: Iterable[UploadRecord], now: float) -> FileUsage:
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
