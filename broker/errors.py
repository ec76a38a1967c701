"""Defines every exception that can leave `broker/`.

HeadraceError
└── BrokerError
    ├── WireError                  bytes that are not the message they should be
    │   ├── MalformedMessage       not msgpack, a missing field or a wrong type; says which
    │   └── UnsupportedVersion     written by a newer major version
    ├── AdmissionError             the request was not accepted; nothing was stored
    │   ├── UnknownModel           no card of that name
    │   ├── NoWorker               the model is known, no worker is ready
    │   ├── Overloaded             a queue is full; `retry_after_s`
    │   ├── BrokerUnavailable      the broker cannot be reached, or this ingress has lost its lease
    │   ├── RequestTooLarge        does not fit, not even in the object store
    │   └── RequestOverLimit       a parameter is larger than one request may have it; `param`
    ├── AdapterRefused             a worker did not load or unload an adapter: the message says which one and why
    ├── ModelServed                a model cannot be removed, because it has live workers
    ├── ResponseUnknown            no stored response has that id
    ├── ResponseNotStored          a response could not be stored; `reason`
    ├── PrefillFailed              (broker/prefill) a remote prefill failed; never leaves the decode worker
    └── JobError                   the end of an accepted request without an answer; a request ends once
        ├── DeadlineExceeded
        ├── JobRefused             shed after acceptance; `reason`, `retry_after_s`
        ├── JobInvalid             the engine rejects the request itself
        ├── JobFailed              the engine failed and the job cannot be retried
        ├── PoisonJob              the request crashes its workers
        ├── ResumeImpossible       the worker died and the engine cannot continue from the point the stream has reached
        ├── SlowClient             the client did not read its tokens in time
        ├── JobWithdrawn           a call by its tenant cancelled the request
        └── JobCancelled           the request was cancelled, or its ingress shuts down
"""

from __future__ import annotations

from headrace.base.errors import HeadraceError


class BrokerError(HeadraceError):
    """A job or one of its messages failed."""


class WireError(BrokerError):
    """Bytes on the wire are not the message they should be."""


class MalformedMessage(WireError):
    """A message is not msgpack, lacks a field or has a field of the wrong type."""


class CardForged(WireError):
    """A model card was not signed with the key of the deployment."""


class CardKeyUnusable(BrokerError):
    """The file with the key that signs model cards cannot be read, or has no key."""


class UnsupportedVersion(WireError):
    """A message was written by a newer major version."""


class AdmissionError(BrokerError):
    """The request was not accepted and nothing was stored."""


class UnknownModel(AdmissionError):
    """No model of that name is served."""

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        served = ", ".join(known) if known else "none"
        super().__init__(f"model {name!r} is not served here; served: {served}")
        self.name = name
        self.known = known


class NoWorker(AdmissionError):
    """The model is known but no worker is ready to serve it."""

    retriable = True


class Overloaded(AdmissionError):
    """A queue is full; nothing was stored."""

    retriable = True

    def __init__(self, message: str | None = None, *, reason: str = "queue_full", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class BrokerUnavailable(AdmissionError):
    """The broker cannot be reached or cannot store; try again shortly."""

    retriable = True


class RequestTooLarge(AdmissionError):
    """The request does not fit into the broker."""


class RequestOverLimit(AdmissionError):
    """A parameter of the request is larger than one request may have it. `param` names it."""

    def __init__(self, message: str | None = None, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class AdapterRefused(BrokerError):
    """An adapter was not loaded or unloaded, at least not everywhere."""


class ModelServed(BrokerError):
    """A model cannot be removed while workers serve it."""


class ResponseUnknown(BrokerError):
    """No such response is stored: it never was, was deleted, has expired, or belongs to another tenant."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"there is no stored response {response_id!r}")
        self.response_id = response_id


class ResponseNotStored(BrokerError):
    """A response could not be stored; `reason` is too_large, timeout or unavailable."""

    def __init__(self, message: str | None = None, *, reason: str = "unavailable") -> None:
        super().__init__(message)
        self.reason = reason


class JobError(BrokerError):
    """An accepted request ended without a full answer."""

    code: str = "job_error"


class DeadlineExceeded(JobError):
    """The request did not finish before its deadline."""

    code = "deadline_exceeded"
    retriable = True


class JobRefused(JobError):
    """The request was accepted and later shed."""

    code = "refused"
    retriable = True

    def __init__(self, message: str | None = None, *, reason: str = "shed", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class JobInvalid(JobError):
    """The engine rejected the request as invalid."""

    code = "invalid_request"

    def __init__(self, message: str | None = None, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class JobFailed(JobError):
    """The engine failed on this request."""

    code = "engine_error"
    retriable = True


class PoisonJob(JobError):
    """The request crashes its workers and was taken out of service."""

    code = "poison"


class ResumeImpossible(JobError):
    """The worker died and the engine cannot continue this request from the point that its stream has reached."""

    code = "resume_impossible"
    retriable = True


class SlowClient(JobError):
    """The client did not read its stream in time."""

    code = "slow_client"


class JobWithdrawn(JobError):
    """The request was cancelled by a call."""

    code = "request_cancelled"


class JobCancelled(JobError):
    """The request was cancelled."""

    code = "cancelled"


# Words the errors of missed deadlines: clients read whether the request waited for nothing or was being answered.


def never_started(waited_s: float) -> str:
    return f"the deadline passed: the request waited {waited_s:.1f} s in the queue and never started"


def unfinished(after_s: float, tokens: int) -> str:
    """Return the text for a request that had begun, `after_s` after its arrival. `tokens` counts those of all choices."""
    return f"the deadline passed after {after_s:.1f} s: the request had started and produced {tokens} tokens"


def waiting_again(after_s: float) -> str:
    """Return the text for a request that had lost its worker and waited for another one."""
    return f"the deadline passed after {after_s:.1f} s: the request had been moved and waited for another worker"


def missed(after_s: float, attempt: int) -> str:
    """Return the text for a request in a queue. Copies with an attempt above 1 were moved there."""
    return never_started(after_s) if attempt == 1 else waiting_again(after_s)
