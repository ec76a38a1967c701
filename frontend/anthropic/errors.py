"""Writes errors in Anthropic's shape, with its types and statuses."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.frontend.anthropic.schema import AnthropicError, AnthropicFault
from headrace.frontend.errors import ContextTooLong, FrontendError

OVERLOADED = 529
VERSION_HEADER = b"anthropic-version"  # in every request of Anthropic's clients

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicForm:
    """The error form of the Messages API. Status 503 of OpenAI's API is 529 here."""

    def __call__(self, error: FrontendError, /) -> bytes:
        return msgspec.json.encode(self._answer(error))

    def status(self, error: FrontendError, /) -> int:
        """Return the HTTP status of an error."""
        return OVERLOADED if error.status == 503 else error.status

    def event(self, error: FrontendError) -> bytes:
        """Return the event that ends a stream that has begun."""
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(self._answer(error))

    def _answer(self, error: FrontendError) -> AnthropicError:
        status = self.status(error)
        kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return AnthropicError(error=AnthropicFault(type=kind, message=_words(error)))


def speaks_anthropic(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True if the headers of a request are those of a client of Anthropic's API."""
    return any(name == VERSION_HEADER for name, _ in headers)


def _words(error: FrontendError) -> str:
    if isinstance(error, ContextTooLong) and error.tokens is not None:
        # clients that shorten long sessions look for this wording
        return f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
    message = str(error)
    # Anthropic's errors have no field for the parameter, so the message names it
    return message if error.param is None or error.param in message else f"{error.param}: {message}"
