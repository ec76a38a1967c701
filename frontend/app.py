"""Builds the ASGI application from the registered APIs, with one shape for every error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.base.errors import HeadraceError
from headrace.broker.models.card_store import AdapterClient
from headrace.frontend.admin import missed as missing_route
from headrace.frontend.apis import Site, Stores, form_of, load_apis
from headrace.frontend.auth.gate import Gate
from headrace.frontend.auth.key_ring import KeyRing
from headrace.frontend.errors import FrontendError, MethodNotAllowed, translate
from headrace.frontend.generation.endpoint import Lifecycle
from headrace.frontend.http.middleware import Observe
from headrace.frontend.job_renderer import ApiRenderer, Charge
from headrace.frontend.metrics import Metrics
from headrace.frontend.openapi import build_openapi
from headrace.frontend.ports import JobPort
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.status import error_response
from headrace.frontend.tracer import tracer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The application. The site's `model_cache` and `tracer` have to run beside it.

    While `lifecycle.draining` is True, new requests are refused.
    """

    app: ASGIApp
    site: Site
    renderer: ApiRenderer
    metrics: Metrics
    lifecycle: Lifecycle


def build_frontend(
    port: JobPort,
    settings: FrontendSettings,
    *,
    metrics: Metrics | None = None,
    lifecycle: Lifecycle | None = None,
    stores: Stores | None = None,
    adapters: AdapterClient | None = None,
    ring: KeyRing | None = None,
) -> Frontend:
    """Build the application over `port`. Nothing runs yet.

    Without `adapters` no adapter can be loaded or unloaded over HTTP, whatever the settings say. `ring` has the
    keys; by default those of the settings. Raises TracingUnusable, and SettingsError for an API that cannot be loaded.
    """
    metrics = metrics or Metrics()
    ring = ring or KeyRing(settings)
    metrics.tenants.hold(settings.metrics_tenants, ring.has_tenant)
    site = Site(
        port,
        settings,
        metrics,
        lifecycle=lifecycle,
        stores=stores,
        adapters=adapters,
        tracer=tracer_of(settings, metrics, frontend=port.id),
        document=build_openapi(),
    )
    for api in load_apis():
        api.mount(site)
    renderer = ApiRenderer(
        site.jobs,
        port.models,
        site.model_cache,
        settings,
        metrics,
        charge=_charge(ring, metrics),
        isolates=lambda: ring.isolates,
    )
    # routes of `hot` are reached here only by other methods
    routes = [*(Route(path, endpoint, methods=["POST"]) for path, endpoint in site.hot.items()), *site.routes]
    starlette = Starlette(routes=routes, exception_handlers=_handlers())
    starlette.router.redirect_slashes = False
    app: ASGIApp = Observe(
        starlette,
        hot=site.hot,
        gate=Gate(settings, ring),
        metrics=metrics,
        routes=frozenset(route.path for route in routes if "{" not in route.path),
        access_log=settings.access_log,
        form_of=form_of,
    )
    if settings.cors_origins:
        app = _with_cors(app, settings.cors_origins)
    return Frontend(app=app, site=site, renderer=renderer, metrics=metrics, lifecycle=site.lifecycle)


def _charge(ring: KeyRing, metrics: Metrics) -> Charge:
    def charge(tenant: str, prompt: int, output: int) -> None:
        ring.quotas.charge(tenant, prompt + output)
        if ring.in_force:
            metrics.tenants.of(tenant, own=False).used(prompt, output)

    return charge


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow web pages of these origins to call the server. Cookies are left out: no route reads them, keys come in headers."""
    return CORSMiddleware(
        app, allow_origins=list(origins), allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"], expose_headers=["*"]
    )


Handler = Callable[[Request, Exception], Awaitable[Response]]


def _handlers() -> dict[int | type[Exception], Handler]:
    async def missed(request: Request, error: Exception) -> Response:
        routes = {route.path for route in request.app.routes if isinstance(route, Route)}
        return _response(missing_route(request.url.path, routes), request)

    async def wrong_method(request: Request, error: Exception) -> Response:
        path = request.url.path
        routes = [r for r in request.app.routes if isinstance(r, Route) and r.path_regex.match(path)]
        allowed = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
        response = _response(MethodNotAllowed(f"{path} does not take {request.method}; it takes {allowed}"), request)
        response.headers["allow"] = allowed
        return response

    async def failed(request: Request, error: Exception) -> Response:
        seen = translate(error)
        request.scope["headrace.outcome"] = seen.code
        return _response(seen, request)

    return {404: missed, 405: wrong_method, HeadraceError: failed}


def _response(error: FrontendError, request: Request) -> Response:
    return error_response(error, form_of(request.url.path, request.headers.raw))
