"""Defines every exception of the client.

HeadraceError
└── ClientError
    ├── NotSubmitted    the job is not stored: its body or options are wrong, or the queue is full
    ├── NotConfirmed    the job may be stored or not; submit it again under the same id
    ├── ResultTimeout   the job has no result yet; it goes on all the same
    ├── UnknownJob      neither the queue nor the results have a job of this id
    ├── NotAllowed      the login cannot do this, or not for this tenant
    └── JobFailed       the job ended without an answer; `status` says how

The server's own errors (`headrace.jetstream.errors`) pass through where no job is concerned, when connecting for example.
"""

from __future__ import annotations

from headrace.base.errors import HeadraceError
from headrace.broker.messages.durable import JobStatus


class ClientError(HeadraceError):
    """A call of the client failed."""


class NotSubmitted(ClientError):
    """The job is not stored."""

    def __init__(self, message: str, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.retriable = retriable


class NotConfirmed(ClientError):
    """The server did not confirm the job in time; it may be stored or not. Submit it again under the same id."""

    retriable = True


class ResultTimeout(ClientError):
    """The job has no result yet."""

    retriable = True


class UnknownJob(ClientError):
    """There is no such job."""


class NotAllowed(ClientError):
    """The login of a tenant cannot do this, or not for another tenant."""


class JobFailed(ClientError):
    """The job ended without an answer."""

    def __init__(self, message: str, status: JobStatus) -> None:
        super().__init__(message)
        self.status: JobStatus = status
