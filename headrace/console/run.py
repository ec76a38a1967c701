"""Runs the console's process: one connection to NATS, one HTTP server, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.errors import HeadraceError
from headrace.console.app import Console, ConsoleOptions, build_console
from headrace.frontend.metrics import Metrics
from headrace.frontend.serving import listen, serve
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.status import Lifecycle
from headrace.jetstream.connect import connect_patiently
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.subjects import Subjects

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
        """Return this object, which is an ASGI application."""
        return self

    async def drain(self, grace_s: float) -> None:
        """End the streams of the tabs."""
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
