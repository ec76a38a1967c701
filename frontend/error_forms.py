"""Chooses the shape of an error by the API that its client speaks, for answers that no endpoint of that API gives."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import Response

from headrace.frontend.anthropic.errors import AnthropicForm, speaks_anthropic
from headrace.frontend.errors import ErrorForm, FrontendError, StatusForm
from headrace.frontend.ollama.errors import PREFIX, OllamaForm

_ANTHROPIC = AnthropicForm()
_OLLAMA = OllamaForm()


def form_of(path: str, headers: Iterable[tuple[bytes, bytes]]) -> ErrorForm:
    """Return the form of errors at a path: that of its API, or of the client if the header says that it speaks Anthropic's."""
    if path == "/v1/messages" or path.startswith("/v1/messages/") or speaks_anthropic(headers):
        return _ANTHROPIC
    if path.startswith(PREFIX):
        return _OLLAMA
    return FrontendError.body


def error_response(error: FrontendError, form: ErrorForm = FrontendError.body) -> Response:
    """Return an error as a response."""
    status = form.status(error) if isinstance(form, StatusForm) else error.status
    response = Response(form(error), status_code=status, media_type="application/json")
    for name, value in error.headers():
        response.headers[name.decode()] = value.decode()
    return response
