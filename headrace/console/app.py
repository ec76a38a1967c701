"""Builds the console's ASGI application: its routes, its tables, and one shape for every error."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.errors import CommandError, HeadraceError
from headrace.broker.keys.store import KeyStore
from headrace.console.actions import Actions
from headrace.console.frontend_proxy import FrontendProxy
from headrace.console.guard import ConsoleGuard
from headrace.console.live_tables import LiveTables
from headrace.console.pages import ConsolePages
from headrace.console.readers import Readers
from headrace.console.requests import RequestRoutes
from headrace.console.sections import Sections, Shared, Source
from headrace.console.started_workers import started_workers
from headrace.console.stream_metrics_route import StreamMetrics
from headrace.frontend.error_forms import error_response
from headrace.frontend.errors import FrontendError, MethodNotAllowed, RouteNotFound, translate
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOptions:
    """The choices of an operator at the start. `key` empty: nothing can be changed but with an API key of scope admin."""

    host: str = "127.0.0.1"
    key: str = ""
    frontend: str = ""
    may_kill: bool = False
    private: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    data_dir: Path | None = None  # of a `headrace up` on this machine, whose starting workers are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The application, and the streams of its tabs, which must be closed before it can stop."""

    app: ASGIApp
    live: LiveTables


def build_console(connection: Connection, names: Subjects, options: ConsoleOptions) -> Console:
    """Build the application over one connection."""
    readers = Readers(connection, names, processes=lambda: started_workers(options.data_dir))
    guard = ConsoleGuard(host=options.host, key=options.key, private=options.private, stored=KeyStore(connection, names).all)
    return build_app(
        sections=Sections(sources_of(readers)),
        guard=guard,
        routes=[
            *RequestRoutes(connection, names, readers, guard).routes(),
            *Actions(connection, names, guard, may_kill=options.may_kill).routes(),
            *FrontendProxy(options.frontend, guard).routes(),
            *StreamMetrics(readers, guard).routes(),
        ],
        options=options,
    )


def sources_of(readers: Readers) -> dict[str, Source]:
    """Return the tables by name. What costs the server more is read less often, and all only while a tab watches it."""
    deployment = Shared(readers.deployment)
    return {
        **{name: deployment.source(name) for name in ("summary", "pools", "workers")},
        "queues": Source(readers.queues),
        "streams": Source(readers.streams, every_s=2.0),
        "routers": Source(readers.routers, every_s=2.0),
        "prefixes": Source(readers.prefixes, every_s=5.0),
        "letters": Source(readers.letters, every_s=2.0),
        "batches": Source(readers.batches, every_s=2.0),
        "models": Source(readers.models, every_s=5.0),
    }


def build_app(*, sections: Sections, guard: ConsoleGuard, routes: list[Route], options: ConsoleOptions) -> Console:
    """Build the application over any tables: those of a deployment, or simulated ones."""

    async def access(request: Request) -> Response:
        """Return what this page may show and do."""
        admin = await guard.is_admin(request.headers)
        told: dict[str, Any] = {
            "version": metadata.version("headrace"),
            "admin": admin,
            "sees": admin or not guard.private,
            "kills": admin and options.may_kill,
            "frontend": options.frontend,
        }
        return Response(msgspec.json.encode(told), media_type="application/json", headers={"cache-control": "no-store"})

    live = LiveTables(sections, guard)
    starlette = Starlette(
        routes=[
            *ConsolePages().routes(),
            Route("/console/events", live.events),
            Route("/console/api/access", access),
            *routes,
        ],
        exception_handlers={HeadraceError: _failed, CommandError: _failed, HTTPException: _refused},
    )
    starlette.router.redirect_slashes = False
    return Console(app=_Guarded(starlette, guard), live=live)


class _Guarded:
    """Checks Host and Origin of every request before anything else."""

    def __init__(self, app: ASGIApp, guard: ConsoleGuard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            try:
                self._guard.check_page(request.method, request.headers)
            except FrontendError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _failed(request: Request, error: Exception) -> Response:
    seen = error if isinstance(error, FrontendError) else translate(error)
    log.info("console.refused", path=request.url.path, status=seen.status, error=str(seen))
    return error_response(seen)


async def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    if status == 405:
        return error_response(MethodNotAllowed(f"{path} does not take {request.method}"))
    return error_response(RouteNotFound(f"the console has no {path[:80]!r}"))
