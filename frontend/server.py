"""The frontend process: connections, ingress and HTTP server under one task group, started and stopped in order.

On SIGTERM the listener closes, running answers go on for the grace period, then what is left is told that the server goes away.
A second signal ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import structlog
import uvicorn

from broker.ingress import Ingress
from broker.stored import StoredResponses, StoreLimits
from frontend.app import Frontend, build_frontend
from frontend.connections import Connections
from frontend.errors import AddressUnavailable
from frontend.lag import watch_lag
from frontend.settings import FrontendSettings
from jetstream.client import Connection, ConnectOptions
from jetstream.errors import HeadraceError, JetStreamError, ServerUnreachable
from jetstream.manage import ensure_topology
from jetstream.subjects import Subjects
from jetstream.topology import Topology

log = structlog.get_logger()

CONNECT_RETRY_S = 0.5
SWITCH_S = 0.001
LAST_WORDS_S = 2  # after the grace period, for the events that tell clients
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run_frontend(
    settings: FrontendSettings,
    options: ConnectOptions,
    subjects: Subjects,
    *,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `on_listening` is given the base URL. Run it under uvloop: it halves the cost of a socket.

    Raises AddressUnavailable, and the ConnectError family when the broker cannot be used at the start.
    """
    listener = listen(settings)
    with contextlib.closing(listener):
        async with _connection(options, subjects, settings) as work, asyncio.TaskGroup() as group:
            ingress = Ingress(work, subjects, namespace=settings.namespace)
            running = group.create_task(ingress.run(), name="ingress")
            limits = StoreLimits(
                ttl_s=settings.response_ttl_s,
                max_bytes=settings.response_max_bytes,
                write_timeout_s=settings.response_store_s,
            )
            frontend = build_frontend(ingress, settings, stored=StoredResponses(work, subjects, limits))
            loading = group.create_task(frontend.shelf.run(), name="shelf")
            _quiet_gc()
            share_evenly()
            try:
                await serve(frontend, settings, listener, drain=ingress.drain, on_listening=on_listening)
            finally:
                frontend.shelf.close()
                loading.cancel()
                running.cancel()


async def serve(
    frontend: Frontend,
    settings: FrontendSettings,
    listener: socket.socket,
    *,
    drain: Callable[[float], Awaitable[None]],
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Answer HTTP on `listener` until a signal comes and running answers have ended. `drain(grace_s)` is awaited meanwhile."""
    connections = Connections(settings, frontend.metrics)
    server = _Server(
        uvicorn.Config(
            frontend.app,
            http=connections.protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=settings.backlog,
            timeout_keep_alive=max(1, round(settings.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(settings.drain_grace_s) + LAST_WORDS_S),
        )
    )
    stop = asyncio.Event()
    with _signals(server, stop):
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server._serve(sockets=[listener]), name="http")
            stopping = group.create_task(stop.wait(), name="stop")
            beside = [
                group.create_task(connections.sweep(), name="connections"),
                group.create_task(watch_lag(frontend.metrics.loop_lag.series()), name="lag"),
            ]
            host, port = listener.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            log.info("frontend.listening", url=url)
            if on_listening is not None:
                on_listening(url)
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            frontend.lifecycle.draining = True
            server.should_exit = True
            log.info("frontend.draining", grace_s=settings.drain_grace_s, connections=len(server.server_state.connections))
            stopping.cancel()
            try:
                await drain(settings.drain_grace_s)
            except HeadraceError as error:
                log.warning("frontend.drain_failed", error=str(error))
            await serving
            for task in beside:
                task.cancel()
    log.info("frontend.stopped")


class _Server(uvicorn.Server):
    """Leaves the signals to us."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@contextlib.contextmanager
def _signals(server: uvicorn.Server, stop: asyncio.Event) -> Iterator[None]:
    """The first signal asks to stop, the second stops waiting for clients."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            server.force_exit = True
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _connection(options: ConnectOptions, subjects: Subjects, settings: FrontendSettings) -> AsyncIterator[Connection]:
    """One connection for everything: token frames on one of their own were measured slower (docs/performance.md)."""
    async with await _connect(options, subjects, settings.start_timeout_s) as work:
        topology = Topology(subjects)
        await ensure_topology(work, topology)

        async def ensure_again() -> None:  # streams in memory do not survive a restart of the server
            try:
                await ensure_topology(work, topology)
            except JetStreamError as error:  # the next reconnect tries again
                log.warning("topology.not_ensured", error=str(error))

        work.on_reconnect(ensure_again)
        yield work


async def _connect(options: ConnectOptions, subjects: Subjects, timeout_s: float) -> Connection:
    """Waits for a server that is not there yet; every other trouble is raised at once."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            return await Connection.connect(options, subjects=subjects)
        except ServerUnreachable as error:
            if loop.time() >= deadline:
                raise
            log.info("frontend.waiting", reason=str(error))
            await asyncio.sleep(CONNECT_RETRY_S)


def listen(settings: FrontendSettings) -> socket.socket:
    """A bound socket. Raises AddressUnavailable."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        message = f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"
        raise AddressUnavailable(message) from None
    listener.setblocking(False)
    return listener


def share_evenly() -> None:
    """Threads that compute for long give the interpreter back to the event loop after a millisecond instead of five."""
    sys.setswitchinterval(SWITCH_S)


def _quiet_gc() -> None:
    """What was loaded at the start stays: never look at it again, and look less often at the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
