"""The ASGI application: routes, and one shape for every error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.chat import ChatApi
from frontend.completions import CompletionApi
from frontend.errors import Draining, FrontendError, MethodNotAllowed, RouteNotFound, translate
from frontend.exchange import Exchange
from frontend.generate import GenerationEndpoint
from frontend.metrics import Metrics
from frontend.observe import Observe
from frontend.openapi import build_openapi
from frontend.ports import JobPort
from frontend.settings import FrontendSettings
from frontend.shelf import ModelShelf
from frontend.status import Lifecycle, StatusRoutes
from jetstream.errors import HeadraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The application and what runs beside it: `shelf.run()`, and `lifecycle.draining` to turn new work away."""

    app: ASGIApp
    shelf: ModelShelf
    lifecycle: Lifecycle
    metrics: Metrics


def build_frontend(port: JobPort, settings: FrontendSettings, *, metrics: Metrics | None = None) -> Frontend:
    """Everything that answers HTTP, over `port`. Nothing runs yet."""
    metrics = metrics or Metrics()
    lifecycle = Lifecycle()
    shelf = ModelShelf(port.models, settings)
    chat = GenerationEndpoint(ChatApi(shelf, settings), port, settings, metrics)
    completions = GenerationEndpoint(CompletionApi(shelf, settings), port, settings, metrics)
    status = StatusRoutes(port, metrics, lifecycle)
    openapi = build_openapi()

    async def describe(request: Request) -> Response:
        return Response(openapi, media_type="application/json")

    hot = {"/v1/chat/completions": _Gate(chat, lifecycle), "/v1/completions": _Gate(completions, lifecycle)}
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in hot.items()),  # reached for other methods only
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/health", status.health),
        Route("/live", status.live),
        Route("/ready", status.ready),
        Route("/metrics", status.metrics),
        Route("/openapi.json", describe),
    ]
    labels = frozenset(route.path for route in routes if "{" not in route.path)
    starlette = Starlette(routes=routes, exception_handlers=_handlers())
    starlette.router.redirect_slashes = False
    app = Observe(starlette, hot=hot, metrics=metrics, routes=labels, access_log=settings.access_log)
    return Frontend(app=app, shelf=shelf, lifecycle=lifecycle, metrics=metrics)


class _Gate:
    """Turns new work away while the process drains; a class, because Starlette takes functions for something else."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._lifecycle.draining:
            await Exchange(scope, receive, send).send_error(Draining(retry_after_s=1.0))
        else:
            await self._app(scope, receive, send)


Handler = Callable[[Request, Exception], Awaitable[Response]]


def _handlers() -> dict[int | type[Exception], Handler]:
    async def missed(request: Request, error: Exception) -> Response:
        served = ", ".join(sorted({r.path for r in request.app.routes if isinstance(r, Route)}))
        return _response(RouteNotFound(f"no route {request.url.path}; served here: {served}"))

    async def wrong_method(request: Request, error: Exception) -> Response:
        allowed = (error.headers or {}).get("Allow", "") if isinstance(error, HTTPException) else ""
        response = _response(MethodNotAllowed(f"{request.url.path} does not take {request.method}; it takes {allowed}"))
        response.headers["allow"] = allowed
        return response

    async def failed(request: Request, error: Exception) -> Response:
        return _response(translate(error))

    return {404: missed, 405: wrong_method, HeadraceError: failed}


def _response(error: FrontendError) -> Response:
    response = Response(error.body(), status_code=error.status, media_type="application/json")
    for name, value in error.headers():
        response.headers[name.decode()] = value.decode()
    return response
