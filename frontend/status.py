"""Routes that report served models and the state of the process.

These are `/v1/models`, `/health`, `/live`, `/ready`, `/metrics`, and `/ping`, `/load` and `/version` as vLLM's server has them.
"""

from __future__ import annotations

from collections.abc import Awaitable
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.broker.errors import BrokerUnavailable
from headrace.frontend.admin import LOAD, UNLOAD, AdapterApi, CancelledRequest, CancelRoute
from headrace.frontend.answer_schema import ModelEntry, ModelList
from headrace.frontend.anthropic.api import AnthropicModel, AnthropicModelList, model_entry, model_page
from headrace.frontend.anthropic.schema import speaks_anthropic
from headrace.frontend.apis import HttpApi, Site, form_of
from headrace.frontend.auth.caller import check_model, covered
from headrace.frontend.durable_api import DurableStreams, StreamRoutes
from headrace.frontend.errors import ErrorForm, FrontendError, StatusForm, translate
from headrace.frontend.generation.endpoint import Lifecycle
from headrace.frontend.metrics import CONTENT_TYPE, Metrics
from headrace.frontend.openapi import either, in_path, json_answer, operation, some_object, states
from headrace.frontend.pages import Pages, Welcome
from headrace.frontend.ports import JobPort, Served


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

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Return the coroutine of the application, so that a request has one less around it."""
        return (self._app or self._answer(scope))(scope, receive, send)

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


def _mount_models(site: Site) -> None:
    status = StatusRoutes(site.port, site.metrics, site.lifecycle)
    site.routes += [Route("/v1/models", status.models), Route("/v1/models/{name:path}", status.model)]


def _model_paths() -> dict[str, Any]:
    """Return the paths that describe models. With the header of Anthropic's clients they answer in Anthropic's shape."""
    where = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    version = {"name": "anthropic-version", "in": "header", "schema": {"type": "string"}}
    page = [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}},
        {"name": "after_id", "in": "query", "schema": {"type": "string"}},
        {"name": "before_id", "in": "query", "schema": {"type": "string"}},
    ]
    listed = {"200": either("the models", "ModelList", "AnthropicModelList")}
    listed["400"] = json_answer("the page does not exist", "AnthropicError")
    one = {"200": either("the model", "ModelEntry", "AnthropicModel")}
    one["404"] = either("no such model", "ErrorAnswer", "AnthropicError")
    return {
        "/v1/models": {"parameters": [version, *page], "get": operation("List the served models", listed)},
        "/v1/models/{model}": {"parameters": [where, version], "get": operation("One model", one)},
    }


MODELS = HttpApi(mount=_mount_models, paths=_model_paths, types=(ModelEntry, ModelList, AnthropicModel, AnthropicModelList))


def _mount_server(site: Site) -> None:
    async def describe(request: Request) -> Response:
        return Response(site.document, media_type="application/json")

    jobs = site.stores.jobs
    if site.adapters is not None and site.settings.adapter_routes:
        adapters = AdapterApi(site.adapters, site.models)
        site.answer(LOAD, adapters.load)
        site.answer(UNLOAD, adapters.unload)
    status = StatusRoutes(site.port, site.metrics, site.lifecycle)
    site.routes += [
        *StreamRoutes(DurableStreams(jobs, site.settings) if jobs is not None else None).routes(),
        *CancelRoute(site.port).routes(),
        Route("/health", status.health),
        Route("/live", status.live),
        Route("/ready", status.ready),
        Route("/metrics", status.metrics),
        Route("/ping", status.ping, methods=["GET", "POST"]),
        Route("/load", status.load),
        Route("/version", status.version),
        Route("/openapi.json", describe),
        *Pages(site.port, site.document).routes(),
    ]


def _request_paths() -> dict[str, Any]:
    return {
        "/v1/requests/{id}": {
            "parameters": [in_path("id")],
            "delete": operation(
                "End a running request",
                {
                    "200": json_answer("it was running and is ended", "CancelledRequest"),
                    "404": json_answer("no such request is running", "ErrorAnswer"),
                    "503": json_answer("not every frontend could be asked", "ErrorAnswer"),
                },
            ),
        },
        "/v1/streams/{job}": {
            "parameters": [in_path("job")],
            "get": operation(
                "Follow a durable stream",
                {
                    "200": {"description": "its events", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
                    "400": json_answer("Last-Event-ID is of no event of it", "ErrorAnswer"),
                    "404": json_answer("there is no such job", "ErrorAnswer"),
                    "410": json_answer("its events are not stored any more", "ErrorAnswer"),
                },
            ),
        },
    }


def _server_paths() -> dict[str, Any]:
    page = {"description": "a page", "content": {"text/html": {"schema": {"type": "string"}}}}
    welcome = json_answer("what this server is", "Welcome")
    welcome["content"] |= page["content"]
    plain = {"200": {"description": "healthy"}, "503": {"description": "unhealthy"}}
    return {
        "/": {"get": operation("What this server is", {"200": welcome})},
        "/docs": {"get": operation("This document as a page", {"200": page})},
        "/health": {"get": operation("What is up", states("healthy", "unhealthy"))},
        "/ready": {
            "parameters": [{"name": "of", "in": "query", "schema": {"type": "string", "enum": ["frontend"]}}],
            "get": operation("Whether some model can answer now, or requests are taken", states("ready", "not ready")),
        },
        "/live": {"get": operation("Whether the process runs", {"200": {"description": "it does"}})},
        "/ping": {"get": operation("Health as a status alone", plain), "post": operation("Health as a status alone", plain)},
        "/load": {
            "get": operation("How many requests use an engine or wait for one", some_object("the count, as `server_load`"))
        },
        "/version": {"get": operation("The version of this server", some_object("the version"))},
        "/metrics": {
            "get": operation("Prometheus metrics", {"200": {"description": "text format", "content": {"text/plain": {}}}})
        },
        "/openapi.json": {"get": operation("This document", {"200": {"description": "OpenAPI 3.1"}})},
    }


SERVER = HttpApi(mount=_mount_server, paths=lambda: {**_request_paths(), **_server_paths()}, types=(CancelledRequest, Welcome))
