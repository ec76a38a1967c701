"""Defines every error that HTTP clients can see, and translates broker errors into HTTP statuses: this happens only here.

HeadraceError
└── FrontendError                  has a status, a type, a code and the parameter at fault
    ├── BadRequest                 400  a parameter is missing, of the wrong type, out of range or not supported
    │   ├── BadFraming             400  it can be read in two ways; the connection is closed
    │   ├── MalformedBody          400  the body is not the JSON it should be
    │   └── ContextTooLong         400  prompt plus wanted tokens exceed the model's context
    ├── Unauthorized               401  no key, or one that is unknown, expired or revoked
    ├── Forbidden                  403  the key does not cover this
    ├── HostRefused                403  the Host header is none of this server's names; its Origin, for the next one
    ├── OriginRefused              403
    ├── QuotaExceeded              429  the key or its tenant has used what it may
    ├── MediaTypeRefused           415  the body is not declared as what the route takes
    ├── RouteNotFound              404
    ├── RequestUnknown             404  there is no such request to be cancelled
    ├── MethodNotAllowed           405
    ├── BodyTimeout                408  the body did not arrive in time
    ├── BodyTooLarge               413
    ├── BodiesFull                 503  too many bodies arrive at once
    ├── HeadersTimeout             408  the connection is closed, as for the next three
    ├── UrlTooLong                 414
    ├── HeadersTooLarge            431
    ├── TooManyConnections         503
    ├── Draining                   503  this process is shutting down
    ├── ModelUnusable              500  the card's tokenizer or template cannot be loaded
    ├── AddressUnavailable         at start: the port cannot be bound
    ├── SigningKeysUnusable        at start: the keys of the identity provider cannot be used
    ├── TracingUnusable            at start: spans cannot be sent to where they should be
    ├── AuditUnusable              at start: what is to be redacted cannot be read
    ├── CertificateUnusable        at start: the certificate or its key cannot be loaded
    └── Translated                 an error of the broker or of NATS, made by `translate`

Every error has a body in OpenAI's shape: `{"error": {message, type, param, code}}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import msgspec

from headrace.base.errors import HeadraceError
from headrace.broker import errors as broker
from headrace.broker.batches import record as batches
from headrace.broker.durable import errors as durable
from headrace.broker.files import errors as files
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge

_TYPES = {429: "rate_limit_error", 502: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}


class FrontendError(HeadraceError):
    """The request cannot be answered."""

    status = 500
    code: str | None = "internal_error"

    def __init_subclass__(cls, *, status: int | None = None, code: str | None = None, retriable: bool | None = None) -> None:
        """Set the class's status, code and `retriable`. The base class gives those that are left out."""
        super().__init_subclass__()
        cls.status = cls.status if status is None else status
        cls.code = cls.code if code is None else code
        cls.retriable = cls.retriable if retriable is None else retriable

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """Return OpenAI's error type, which follows from the status."""
        return _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        """Return the JSON body. A stream that has begun sends it as the data of its last event."""
        detail = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": detail})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return `Retry-After` if waiting helps, and `x-should-retry: false` for OpenAI's clients if no retry can succeed."""
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
            headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(self.retry_after_s * 1000))))
        if self.status >= 500 and not self.retriable:
            headers.append((b"x-should-retry", b"false"))
        return headers


class ErrorForm(Protocol):
    """Writes the JSON body of an error that comes instead of an answer."""

    def __call__(self, error: FrontendError, /) -> bytes: ...


@runtime_checkable
class StatusForm(ErrorForm, Protocol):
    """Writes errors of an API that has statuses of its own."""

    def status(self, error: FrontendError, /) -> int: ...


class BadRequest(FrontendError, status=400, code="invalid_parameter"):
    """A parameter is wrong."""


class BadFraming(BadRequest):
    """The request can be read in two ways, and so can where the next one begins: the connection is closed."""


class MalformedBody(BadRequest, code="malformed_json"):
    """The body could not be parsed as JSON."""


class ContextTooLong(BadRequest, code="context_length_exceeded"):
    """The prompt and the wanted tokens do not fit into the model's context. `tokens` is the prompt's length, where known."""

    tokens: int | None = None
    most: int | None = None  # the context length


class Unauthorized(FrontendError, status=401, code="invalid_api_key"):
    """The request has no key, or one that is not valid. The message is the same for unknown, expired and revoked keys."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return `WWW-Authenticate`, which RFC 9110 asks for, beside the other headers."""
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class Forbidden(FrontendError, status=403, code="permission_denied"):
    """The key is valid and does not cover what it is used for."""


class HostRefused(FrontendError, status=403, code="host_refused"):
    """The request names a host that is not this server's."""


class OriginRefused(FrontendError, status=403, code="origin_refused"):
    """The request comes from a web page of another site."""


class QuotaExceeded(FrontendError, status=429, code="rate_limit_exceeded", retriable=True):
    """A key or its tenant has used what it may. `more_headers` are the rate limit headers of the answer."""

    more_headers: list[tuple[bytes, bytes]] | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), *(self.more_headers or ())]


class MediaTypeRefused(FrontendError, status=415, code="unsupported_media_type"):
    """The route takes bodies of another type."""


class RouteNotFound(FrontendError, status=404, code="not_found"):
    """The route does not exist."""


class RequestUnknown(FrontendError, status=404, code="request_not_found"):
    """No such request is running."""


class MethodNotAllowed(FrontendError, status=405, code="method_not_allowed"):
    """The route does not take this method."""


class BodyTimeout(FrontendError, status=408, code="body_timeout"):
    """The body of the request did not arrive in time."""


class BodyTooLarge(FrontendError, status=413, code="body_too_large"):
    """The body of the request is larger than this server takes."""


class BodiesFull(FrontendError, status=503, code="too_many_bodies", retriable=True):
    """Bodies that are still arriving hold as much memory as this server gives them."""


class HeadersTimeout(FrontendError, status=408, code="headers_timeout"):
    """The headers of the request did not arrive in time."""


class UrlTooLong(FrontendError, status=414, code="url_too_long"):
    """The request line is longer than this server takes."""


class HeadersTooLarge(FrontendError, status=431, code="headers_too_large"):
    """The request has more or larger headers than this server takes."""


class TooManyConnections(FrontendError, status=503, code="too_many_connections", retriable=True):
    """This server has as many connections, or this connection as many requests, as it takes."""


class Draining(FrontendError, status=503, code="draining", retriable=True):
    """This server is shutting down; another one, or the next start, will answer."""


class ModelUnusable(FrontendError, code="model_unusable"):
    """The model's card names a tokenizer or template that cannot be loaded."""


class AddressUnavailable(FrontendError, code="address_unavailable"):
    """The address to listen on cannot be bound."""


class SigningKeysUnusable(FrontendError, code="signing_keys_unusable"):
    """The keys of the identity provider cannot be used."""


class MediaDecodingUnusable(FrontendError, code="media_decoding_unusable"):
    """Images cannot be decoded here: the package for it is not installed."""


class TracingUnusable(FrontendError, code="tracing_unusable"):
    """Spans cannot be sent: the address is none, or OpenTelemetry is not installed."""


class AuditUnusable(FrontendError, code="audit_unusable"):
    """The patterns of what is to be redacted in audit records cannot be read."""


class CertificateUnusable(FrontendError, code="certificate_unusable"):
    """The certificate of the server, or its key, cannot be loaded."""


class Translated(FrontendError):
    """A broker or NATS error as the client sees it."""

    def __init__(
        self, error: BaseException, *, status: int, code: str, param: str | None = None, retry_after_s: float | None = None
    ):
        super().__init__(str(error), param=param, code=code, retry_after_s=retry_after_s)
        self.status = status
        self.retriable = status == 503 or (isinstance(error, HeadraceError) and error.retriable)


RETRY_SOON_S = 1.0
UNAVAILABLE = frozenset({"draining", "no_worker", "no_eligible_worker", "no_prefill_worker", "unavailable", "engine_dead"})
"""Reasons of refusals for want of a worker. The others are about load."""

Rule = Callable[[BaseException], FrontendError]


def _fixed(status: int, code: str, *, param: str | None = None, retry_after_s: float | None = None) -> Rule:
    return lambda error: Translated(error, status=status, code=code, param=param, retry_after_s=retry_after_s)


def _overloaded(error: BaseException) -> FrontendError:
    assert isinstance(error, broker.Overloaded)  # noqa: S101  # the table below keys on the class
    return Translated(error, status=429, code=error.reason, retry_after_s=error.retry_after_s)


def _refused(error: BaseException) -> FrontendError:
    assert isinstance(error, broker.JobRefused)  # noqa: S101  # the table keys on the class
    status = 503 if error.reason in UNAVAILABLE else 429
    param = "model" if error.reason == "no_worker" else None
    return Translated(error, status=status, code=error.reason, param=param, retry_after_s=error.retry_after_s)


def _invalid(error: BaseException) -> FrontendError:
    assert isinstance(error, broker.JobInvalid)  # noqa: S101  # the table keys on the class
    return Translated(error, status=400, code=error.code, param=error.param)


def _invalid_file(error: BaseException) -> FrontendError:
    assert isinstance(error, files.FileInvalid)  # noqa: S101  # the table keys on the class
    return Translated(error, status=400, code="invalid_parameter", param=error.param)


def _too_many_batches(error: BaseException) -> FrontendError:
    assert isinstance(error, batches.BatchRateExceeded)  # noqa: S101  # the table keys on the class
    return Translated(error, status=429, code="rate_limit_exceeded", retry_after_s=error.retry_after_s)


def _over_limit(error: BaseException) -> FrontendError:
    assert isinstance(error, broker.RequestOverLimit)  # noqa: S101  # the table keys on the class
    return Translated(error, status=400, code="parameter_too_large", param=error.param)


_RULES: dict[type[BaseException], Rule] = {
    broker.UnknownModel: _fixed(404, "model_not_found", param="model"),
    broker.NoWorker: _fixed(503, "no_worker", param="model", retry_after_s=RETRY_SOON_S),
    broker.Overloaded: _overloaded,
    broker.BrokerUnavailable: _fixed(503, "broker_unavailable", retry_after_s=RETRY_SOON_S),
    broker.RequestTooLarge: _fixed(413, "request_too_large"),
    broker.RequestOverLimit: _over_limit,
    broker.DeadlineExceeded: _fixed(504, broker.DeadlineExceeded.code),
    broker.JobRefused: _refused,
    broker.JobInvalid: _invalid,
    broker.JobFailed: _fixed(502, broker.JobFailed.code),
    broker.PoisonJob: _fixed(500, broker.PoisonJob.code),
    broker.ResumeImpossible: _fixed(502, broker.ResumeImpossible.code),
    broker.SlowClient: _fixed(408, broker.SlowClient.code),
    broker.JobWithdrawn: _fixed(499, broker.JobWithdrawn.code),
    broker.JobCancelled: _fixed(503, broker.JobCancelled.code, retry_after_s=RETRY_SOON_S),
    broker.AdapterRefused: _fixed(400, "adapter_refused"),
    broker.ModelServed: _fixed(409, "model_served"),
    broker.WireError: _fixed(400, "invalid_request"),
    durable.JobMalformed: _fixed(400, "invalid_request"),
    durable.JobUnknown: _fixed(404, "job_not_found"),
    durable.JobNameReused: _fixed(409, "idempotency_key_reused"),
    durable.StreamIncomplete: _fixed(410, "stream_gone"),
    durable.EventUnknown: _fixed(400, "invalid_request", param="Last-Event-ID"),
    broker.ResponseUnknown: _fixed(404, "response_not_found", param="response_id"),
    broker.ResponseNotStored: _fixed(503, "response_not_stored", retry_after_s=RETRY_SOON_S),
    files.FileUnknown: _fixed(404, "file_not_found", param="id"),
    files.UploadUnknown: _fixed(404, "upload_not_found", param="upload_id"),
    files.UploadClosed: _fixed(400, "upload_closed", param="upload_id"),
    files.FileInvalid: _invalid_file,
    files.FileTooLarge: _fixed(413, "file_too_large", param="file"),
    files.FileQuotaExceeded: _fixed(403, "file_quota_exceeded"),
    files.FileNotStored: _fixed(503, "file_not_stored", retry_after_s=RETRY_SOON_S),
    batches.BatchUnknown: _fixed(404, "batch_not_found", param="batch_id"),
    batches.BatchChangeRefused: _fixed(409, "batch_has_ended"),
    batches.BatchQuotaExceeded: _fixed(429, "batch_quota_exceeded", retry_after_s=60.0),
    batches.BatchRateExceeded: _too_many_batches,
    batches.InputUnfit: _fixed(400, "invalid_input_file", param="input_file_id"),
    batches.InputGone: _fixed(400, "input_file_not_found", param="input_file_id"),
    PayloadTooLarge: _fixed(413, "request_too_large"),
    JetStreamError: _fixed(503, "broker_unavailable", retry_after_s=RETRY_SOON_S),
}


def translate(error: BaseException) -> FrontendError:
    """Return the error as the client sees it. An unexpected exception becomes a 500 that reveals no details."""
    if isinstance(error, FrontendError):
        return error
    for kind in type(error).__mro__:
        if rule := _RULES.get(kind):
            return rule(error)
    if isinstance(error, HeadraceError):
        return Translated(error, status=503 if error.retriable else 500, code="internal_error")
    return FrontendError("internal error; the log of this server has the details under this request's id")
