"""Serves an application over HTTP with uvicorn, until a signal arrives and running answers have ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import structlog
import uvicorn
from starlette.types import ASGIApp

from headrace.base.errors import HeadraceError
from headrace.base.process import REFUSE, ending_signals
from headrace.frontend.auth.caller import is_loopback
from headrace.frontend.errors import AddressUnavailable
from headrace.frontend.generation.endpoint import Lifecycle
from headrace.frontend.http.connections import Connections, ServerTls
from headrace.frontend.http.loop import watch_lag
from headrace.frontend.metrics import Metrics
from headrace.frontend.settings import FrontendSettings

log = structlog.get_logger()

# On every answer: browsers must not guess its type, show it in a frame, tell other sites its address, or embed it elsewhere.
SECURITY_HEADERS = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
)
STARTING_S = 0.002
LAST_WORDS_S = 2  # after the grace period, for the events that tell clients
HURRIED_WORDS_S = 1.0  # the same after a second signal


Drain = Callable[[float], Coroutine[Any, Any, None]]


class Parts:
    """The parts of a process: each runs in a task of its own until the process ends, and on SIGTERM all drain at once."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []
        self._drains: list[Drain] = []

    def start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]], drain: Drain | None = None) -> None:
        """Start a part. `drain(grace_s)` finishes its work within the grace period, while it still runs."""
        self._tasks.append(self._group.create_task(run(), name=name))
        if drain is not None:
            self._drains.append(drain)

    async def drain(self, grace_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for drain in self._drains:
                group.create_task(drain(grace_s))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


class ServableApp(Protocol):
    """An application that `serve` can run."""

    @property
    def app(self) -> ASGIApp: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
    @property
    def metrics(self) -> Metrics: ...


async def serve(
    frontend: ServableApp,
    settings: FrontendSettings,
    listener: socket.socket,
    *,
    drain: Drain,
    on_listening: Callable[[str], None] | None = None,
    more: Sequence[socket.socket] = (),
) -> None:
    """Serve HTTP on `listener` until a signal arrives and running answers have ended; `drain(grace_s)` is awaited meanwhile.

    `more`: sockets on which it serves the same.
    """
    connections = Connections(settings, frontend.metrics)
    tls = ServerTls(settings.tls_cert, settings.tls_key) if settings.tls_cert is not None else None
    _warn_of_plain_http(settings)
    server = _Server(
        uvicorn.Config(
            frontend.app,
            interface="asgi3",  # uvicorn would call an app twice that is not a coroutine function
            http=connections.protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            headers=list(SECURITY_HEADERS),
            ssl_context_factory=None if tls is None else lambda _config, _default: tls.context,
            proxy_headers=False,
            backlog=settings.backlog,
            timeout_keep_alive=max(1, round(settings.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(settings.drain_grace_s) + LAST_WORDS_S),
        )
    )
    stop, hurry = asyncio.Event(), asyncio.Event()
    with _signals(server, stop, hurry, frontend.lifecycle):
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server._serve(sockets=[listener, *more]), name="http")
            stopping = group.create_task(stop.wait(), name="stop")
            parts = Parts(group)
            parts.start("connections", connections.sweep)
            parts.start("lag", partial(watch_lag, frontend.metrics.loop_lag.series()))
            if tls is not None:
                parts.start("tls", tls.watch)
            host, port = listener.getsockname()[:2]
            scheme = "http" if tls is None else "https"
            url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
            while not server.started and not serving.done():  # a client that connected earlier would be refused
                await asyncio.sleep(STARTING_S)
            log.info("frontend.listening", url=url)
            if on_listening is not None:
                on_listening(url)
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            frontend.lifecycle.draining = True
            server.should_exit = True
            log.info("frontend.draining", grace_s=settings.drain_grace_s, connections=len(server.server_state.connections))
            stopping.cancel()
            try:
                await _drain(drain, settings.drain_grace_s, hurry)
            except* HeadraceError as failed:
                log.warning("frontend.drain_failed", error=str(failed.exceptions[0]))
            await serving
            parts.stop()
    log.info("frontend.stopped")


async def _drain(drain: Drain, grace_s: float, hurry: asyncio.Event) -> None:
    """Drain within a grace period that `hurry` ends at once: running answers get their error, not a closed connection."""
    async with asyncio.TaskGroup() as group:
        draining, hurrying = group.create_task(drain(grace_s)), group.create_task(hurry.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        hurrying.cancel()
    if draining.cancelled():
        await drain(0.0)


def _warn_of_plain_http(settings: FrontendSettings) -> None:
    """Say that keys and prompts can be read on their way, unless the operator has said that this is meant."""
    if settings.tls_cert is None and not settings.insecure and not is_loopback(settings.host):
        log.warning(
            "frontend.plain_http",
            host=settings.host,
            meaning="API keys and prompts travel unencrypted: give --tls-cert, or put a proxy with TLS in front",
        )


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signal handling to this module."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@contextlib.contextmanager
def _signals(server: uvicorn.Server, stop: asyncio.Event, hurry: asyncio.Event, lifecycle: Lifecycle) -> Iterator[None]:
    """Handle signals: the first one starts the shutdown, the second one ends the grace period and soon the wait for clients."""
    loop = asyncio.get_running_loop()

    def refuse() -> None:
        lifecycle.draining = True
        log.info("frontend.refusing")

    def force() -> None:
        server.force_exit = True

    def on_signal() -> None:
        if stop.is_set() and not hurry.is_set():
            hurry.set()
            loop.call_later(HURRIED_WORDS_S, force)
        stop.set()

    numbers = ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(REFUSE, refuse)
    try:
        yield
    finally:
        for number in (*numbers, REFUSE):
            loop.remove_signal_handler(number)


def listen(settings: FrontendSettings) -> socket.socket:
    """Bind a socket to the configured address. Raises AddressUnavailable."""
    return _bound(settings.host, settings.port, shared=settings.share_port)


def listen_alone(settings: FrontendSettings) -> list[socket.socket]:
    """Bind a socket to the port that no other frontend has; none if it is not configured. Raises AddressUnavailable."""
    return [_bound(settings.host, settings.own_port)] if settings.own_port else []


def _bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise AddressUnavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener
