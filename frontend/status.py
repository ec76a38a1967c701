"""Routes that report served models and the state of the process.

These are `/v1/models`, `/health`, `/live`, `/ready`, `/metrics`, and `/ping`, `/load` and `/version` as vLLM's server has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.broker.errors import BrokerUnavailable
from headrace.frontend.answer_schema import ModelEntry, ModelList
from headrace.frontend.anthropic.api import model_entry, model_page
from headrace.frontend.anthropic.schema import AnthropicForm, speaks_anthropic
from headrace.frontend.auth.caller import check_model, covered
from headrace.frontend.errors import ErrorForm, FrontendError, StatusForm, translate
from headrace.frontend.metrics import CONTENT_TYPE, Metrics
from headrace.frontend.ollama.schema import PREFIX, OllamaForm
from headrace.frontend.ports import JobPort, Served


class Lifecycle:
    """The state of the process: while `draining`, it refuses new requests. `load` counts the requests that use an engine."""

    def __init__(self) -> None:
        self.draining = False
        self.load = 0


class StatusRoutes:
    """Endpoints that read the state and change nothing."""

    def __init__(self, port: JobPort, metrics: Metrics, lifecycle: Lifecycle) -> None:
        self._port = port
        self._metrics = metrics
        self._lifecycle = lifecycle

    async def models(self, request: Request) -> Response:
        """List the models, their aliases and the adapters that have a ready worker, each by its own name."""
        models = self._port.models
        served = covered(request.scope, [models.get(name) for name in models.listed_names()])
        if speaks_anthropic(request.headers.raw):
            return _json(model_page(served, request.query_params))
        return _json(ModelList(data=[_entry(each) for each in served]))

    async def model(self, request: Request) -> Response:
        """Describe one model, even without workers. The name may contain slashes and may be an alias. Raises UnknownModel.

        Without a name, which is the listing's path with a slash behind it, list the models.
        """
        name = request.path_params["name"]
        if not name:
            return await self.models(request)
        served = self._port.models.get(name)
        check_model(request.scope, served.adapter or served.card.model)
        return _json(model_entry(served) if speaks_anthropic(request.headers.raw) else _entry(served))

    async def version(self, request: Request) -> Response:
        return _json({"version": metadata.version("headrace")})

    async def load(self, request: Request) -> Response:
        """Count the requests that wait for an engine or are being answered, in this frontend."""
        return _json({"server_load": self._lifecycle.load})

    async def ping(self, request: Request) -> Response:
        """Answer like `health`, without a body."""
        return Response(status_code=503 if self._why_not(self._port.models.ready_names()) else 200)

    async def live(self, request: Request) -> Response:
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """Answer 200 only if a request for at least one model could be answered now.

        With `?of=frontend` it need only be taken: without a worker it waits for one, which may not have to run before.
        """
        ready = self._port.models.ready_names()
        why = self._why_not(ready, alone=request.query_params.get("of") == "frontend")
        return _json({"status": "not ready" if why else "ready", "reason": why, "models": ready}, status=503 if why else 200)

    async def health(self, request: Request) -> Response:
        models = self._port.models
        ready = models.ready_names()
        why = self._why_not(ready)
        state: dict[str, Any] = {
            "status": "unhealthy" if why else "healthy",
            "reason": why,
            "broker": {"ready": self._port.ready, **({"trouble": self._port.trouble} if self._port.trouble else {})},
            "draining": self._lifecycle.draining,
            "models": {name: _model_health(models.get(name), ready=name in ready) for name in models.names()},
        }
        return _json(state, status=503 if why else 200)

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._metrics.render_for(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    def _why_not(self, ready: list[str], *, alone: bool = False) -> str | None:
        if self._lifecycle.draining:
            return "draining"
        if not self._port.ready:
            return f"this frontend {self._port.trouble}"
        return None if ready or alone else "no model has a ready worker"


def _model_health(served: Served, *, ready: bool) -> dict[str, Any]:
    return {"workers": served.workers, "ready": ready, "kinds": served.card.kinds}


def _entry(served: Served) -> ModelEntry:
    card, adapter = served.card, served.adapter
    return ModelEntry(
        id=served.name,
        created=int(card.created),
        owned_by=card.owner,
        max_model_len=card.context_length,
        root=adapter or card.model,
        parent=card.model if adapter is not None else None,
    )


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


# Answers HTTP before the broker can be used: alive, not ready, and why. Later requests go to the application.

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
            return _json({"status": "alive"}, status=200)
        if path == "/metrics":
            return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})
        if path == "/ready":
            return _json({"status": "not ready", "reason": self.reason, "models": []}, status=503)
        if path == "/health":
            state = {"status": "unhealthy", "reason": self.reason, "broker": {"ready": False, "trouble": self.reason}}
            return _json({**state, "draining": self.lifecycle.draining, "models": {}}, status=503)
        error = translate(BrokerUnavailable(f"{self.reason}; try again shortly"))
        return error_response(error, form_of(path, scope["headers"]))
