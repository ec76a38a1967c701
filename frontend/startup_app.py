"""Answers HTTP before the broker can be used: alive, not ready, and why. Later requests go to the application."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.broker.errors import BrokerUnavailable
from headrace.frontend.anthropic.schema import AnthropicForm, speaks_anthropic
from headrace.frontend.errors import ErrorForm, FrontendError, StatusForm, translate
from headrace.frontend.metrics import CONTENT_TYPE, Metrics
from headrace.frontend.ollama.schema import PREFIX, OllamaForm
from headrace.frontend.status import Lifecycle

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
    status = form.status(error) if isinstance(form, StatusForm) else error.status
    response = Response(form(error), status_code=status, media_type="application/json")
    for name, value in error.headers():
        response.headers[name.decode()] = value.decode()
    return response


class StartupApp:
    """An ASGI application that exists from the start. After `open` it passes every request to the real one."""

    def __init__(self, metrics: Metrics, lifecycle: Lifecycle) -> None:
        self.metrics = metrics
        self.lifecycle = lifecycle
        self.reason = "this frontend is connecting to the broker"
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """Pass all requests to `app` from now on."""
        self._app = app

    def waiting(self, reason: str) -> None:
        self.reason = reason

    @property
    def app(self) -> ASGIApp:
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if app is None and scope["type"] == "http":
            app = self._answer(scope)
        if app is not None:
            await app(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        path = scope["path"]
        if path == "/live":
            return _json({"status": "alive"}, 200)
        if path == "/metrics":
            return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})
        if path == "/ready":
            return _json({"status": "not ready", "reason": self.reason, "models": []}, 503)
        if path == "/health":
            state = {"status": "unhealthy", "reason": self.reason, "broker": {"ready": False, "trouble": self.reason}}
            return _json({**state, "draining": self.lifecycle.draining, "models": {}}, 503)
        error = translate(BrokerUnavailable(f"{self.reason}; try again shortly"))
        return error_response(error, form_of(path, scope["headers"]))


def _json(value: object, status: int) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
