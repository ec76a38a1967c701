"""The command `headrace console`: its process, its ASGI application, and one shape for every error."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Coroutine
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

from headrace.base.errors import CommandError, HeadraceError, SettingsError
from headrace.broker.keys import KeyStore
from headrace.commands.run import run_part, start_part
from headrace.config.build_settings import add_setting_flags, connect_options, subjects
from headrace.config.settings import Settings
from headrace.console.guard import ConsoleGuard, ConsolePages, FrontendProxy
from headrace.console.readers import Readers, started_workers
from headrace.console.tables import Actions, LiveTables, RequestRoutes, Sections, Shared, Source, StreamMetrics
from headrace.frontend.auth.caller import is_loopback
from headrace.frontend.errors import FrontendError, MethodNotAllowed, RouteNotFound, translate
from headrace.frontend.generation.endpoint import Lifecycle
from headrace.frontend.metrics import Metrics
from headrace.frontend.serving import listen, serve
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.status import error_response
from headrace.jetstream.client import Connection, connect_patiently
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.subjects import Subjects
from headrace.up.process import SUPERVISOR_PID
from headrace.up.runfile import read_run_file

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


# Runs the console's process: one connection to NATS, one HTTP server, until a signal.

CONNECT_S = 30.0
DRAIN_S = 1.0  # for what an operator has just asked for


class ConsoleServer:
    """The application for `serve`, which only asks for patience until there is a connection to NATS."""

    def __init__(self) -> None:
        self.lifecycle = Lifecycle()
        self.metrics = Metrics()
        self.console: Console | None = None

    @property
    def app(self) -> ASGIApp:
        return self

    async def drain(self, grace_s: float) -> None:
        if self.console is not None:
            self.console.live.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.console is not None:
            await self.console.app(scope, receive, send)
        elif scope["type"] == "http":
            await Response("The console waits for the NATS server; load this page again.\n", 503)(scope, receive, send)


async def run_console(
    options: ConsoleOptions,
    connect: ConnectOptions,
    subjects: Subjects,
    *,
    port: int,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises AddressUnavailable, and the ConnectError family if NATS cannot be used."""
    settings = FrontendSettings(
        host=options.host,
        port=port,
        drain_grace_s=DRAIN_S,
        max_connections=512,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
    )
    server = ConsoleServer()
    with contextlib.closing(listen(settings)) as listener:
        try:
            async with asyncio.TaskGroup() as group:
                working = group.create_task(_work(server, options, connect, subjects), name="connection")
                await serve(server, settings, listener, drain=server.drain, on_listening=on_listening)
                working.cancel()
        except BaseExceptionGroup as failed:
            if len(failed.exceptions) == 1 and isinstance(failed.exceptions[0], HeadraceError):
                raise failed.exceptions[0] from None
            raise


async def _work(server: ConsoleServer, options: ConsoleOptions, connect: ConnectOptions, subjects: Subjects) -> None:
    async with await connect_patiently(connect, subjects=subjects, timeout_s=CONNECT_S) as connection:
        server.console = build_console(connection, subjects, options)
        await asyncio.Event().wait()


KEY_BYTES = 24
LEAST_KEY = 16  # characters of a key that an operator chooses


def run_console_command(settings: Settings) -> int:
    """Run `headrace console`. Raises SettingsError."""
    given: str = settings["console.key"] or ""
    if given and len(given) < LEAST_KEY:
        raise SettingsError(f"console.key ({settings.source('console.key')}) has {len(given)} characters, it needs {LEAST_KEY}")
    key = given or secrets.token_urlsafe(KEY_BYTES)
    if settings["console.tls_key"] and not settings["console.tls_cert"]:
        raise SettingsError(f"console.tls_key ({settings.source('console.tls_key')}) needs console.tls_cert")
    in_up = SUPERVISOR_PID in os.environ  # which prints the link with its own ready text
    start_part(settings, {"component": "console"})
    options = connect_options(settings, name="headrace console")
    logs_in = any((options.user, options.token, options.credentials, options.nkey_seed))
    host: str = settings["console.host"]
    console = ConsoleOptions(
        host=host,
        key=key,
        frontend=settings["console.frontend"] or _running_frontend(settings),
        may_kill=settings["console.allow_kill"],
        private=settings["console.private"] or logs_in or not is_loopback(host),
        tls_cert=settings["console.tls_cert"],
        tls_key=settings["console.tls_key"],
        data_dir=Path(settings["data_dir"]).resolve(),
    )

    def say(url: str) -> None:
        if not in_up:
            sys.stdout.write(f"The console is at {url}/console#key={key}\n")
            sys.stdout.flush()

    def start() -> Coroutine[Any, Any, int | None]:

        return run_console(console, options, subjects(settings), port=settings["console.port"], on_listening=say)

    return run_part(settings, start)


def _running_frontend(settings: Settings) -> str:
    running = read_run_file(Path(settings["data_dir"]).resolve())
    return running.url or "" if running is not None else ""


EXAMPLES = """examples:
  headrace console                                beside a running `headrace up`, in its folder
  headrace console --nats nats://broker:4222 --frontend http://gateway:8000
  HEADRACE_CONSOLE_KEY=… headrace console --console-host 0.0.0.0

`headrace up` serves one already (--no-console: none). The link that is printed holds the admin key; without it the console only
shows, and where other machines reach it, or NATS asks for a login, it shows nothing."""


def add_console(commands: Any, about: str) -> None:
    parser = commands.add_parser(
        "console",
        help=about,
        description="Serve the console: a deployment in a browser, live, at /console.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_setting_flags(parser, "console")
    parser.set_defaults(run=_run, prog="headrace console")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.commands.control import located_settings

    return run_console_command(located_settings(parsed, "console"))
