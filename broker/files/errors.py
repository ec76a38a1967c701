"""Defines every exception that can leave `broker/files/`.

BrokerError
└── FileError
    ├── FileUnknown            no file of this tenant has that id
    ├── UploadUnknown          no upload of this tenant has that id
    ├── UploadClosed           an upload was completed, cancelled or has expired; `status`
    ├── FileInvalid            a parameter of a file, upload or list is wrong; `param`
    ├── FileTooLarge           a file has more bytes than files of its purpose may have
    ├── FileQuotaExceeded      the tenant has as many files or bytes as it may have
    └── FileNotStored          a file could not be stored in time
"""

from __future__ import annotations

from headrace.broker.errors import BrokerError

LONGEST_SHOWN = 100


class FileError(BrokerError):
    """A file cannot be stored or read."""


class FileUnknown(FileError):
    """No such file: it never was, was deleted, has expired, or belongs to another tenant."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"No such File object: {file_id[:LONGEST_SHOWN]}")
        self.file_id = file_id


class UploadUnknown(FileError):
    """No such upload: it never was, has expired long ago, or belongs to another tenant."""

    def __init__(self, upload_id: str) -> None:
        super().__init__(f"No such Upload object: {upload_id[:LONGEST_SHOWN]}")
        self.upload_id = upload_id


class UploadClosed(FileError):
    """The upload has ended."""

    def __init__(self, upload_id: str, status: str = "closed") -> None:
        super().__init__(f"Upload {upload_id} is {status} and takes nothing more")
        self.status = status


class FileInvalid(FileError):
    """A parameter of a file, an upload or a list is wrong."""

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class FileTooLarge(FileError):
    """The file is larger than files of its purpose may be."""


class FileQuotaExceeded(FileError):
    """The tenant has as many files, or as many bytes in files, as it may have."""


class FileNotStored(FileError):
    """The file could not be stored in time."""

    retriable = True
