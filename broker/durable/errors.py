"""Defines every exception that can leave `broker/durable/`.

BrokerError
└── DurableError
    ├── JobMalformed       a stored message is no job: says which part of it, and its value
    ├── JobRejected        a job cannot be run as it is: the status and body that its client gets
    ├── JobUnknown         no job of that name is stored, and no result
    ├── JobNameReused      the name is that of a job with another body
    ├── StreamIncomplete   entries of a durable stream are missing or do not join
    ├── EventUnknown       a reader asks for what comes after an event that the ended stream does not have
    └── CarrierLost        another carrier has taken the job, or this one has lost its lease
"""

from __future__ import annotations

from headrace.broker.errors import BrokerError


class DurableError(BrokerError):
    """Durable work failed."""


class JobMalformed(DurableError):
    """A stored message is no job."""


class JobRejected(DurableError):
    """A job cannot be run as it is; `body` is the JSON error that an HTTP client would get with `status`."""

    def __init__(self, message: str, *, status: int, body: bytes) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class JobUnknown(DurableError):
    """No job of that name is known."""


class JobNameReused(DurableError):
    """A name is that of a job with another body."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} is the job of another request: give this one a name or key of its own, or repeat that body")


class StreamIncomplete(DurableError):
    """Entries of a durable stream are missing or do not join."""


class EventUnknown(DurableError):
    """A reader asks for what comes after an event that the ended stream does not have."""


class CarrierLost(DurableError):
    """The job is another carrier's now."""
