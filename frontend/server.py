"""Runs the frontend process: connections, ingress and HTTP server under one task group, started and stopped in order.

On SIGTERM the listener closes and running answers go on for the grace period. Answers that are still running then end with an
error saying that the server shuts down. A second signal ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol

import structlog
import uvicorn
from starlette.types import ASGIApp

from headrace.broker.batches.settings import BatchSettings
from headrace.broker.durable.carrier.carrier import Carrier
from headrace.broker.durable.queue_quotas import QueueQuotas
from headrace.broker.durable.quota import QuotaLimits
from headrace.broker.durable.stored_jobs import StoredJobs
from headrace.broker.files.store import FileStore
from headrace.broker.files.sweeper import FileSweeper
from headrace.broker.files.uploads import UploadStore
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.ingress.record_index import RecordIndex
from headrace.broker.ingress.response_store import ResponseStore, StoreLimits
from headrace.broker.keys.store import KeyStore
from headrace.broker.models.adapter_client import AdapterClient
from headrace.broker.result_objects import ResultObjects
from headrace.broker.settings import IngressSettings
from headrace.frontend.app import Stores, build_frontend
from headrace.frontend.auth.audit import operator_acted
from headrace.frontend.auth.exposure import is_loopback
from headrace.frontend.auth.key_ring import KeyRing
from headrace.frontend.auth.quota_share import QuotaShare
from headrace.frontend.batches.frontend_batches import FrontendBatches
from headrace.frontend.errors import AddressUnavailable
from headrace.frontend.files.limits import file_limits
from headrace.frontend.http.connections import Connections
from headrace.frontend.http.loop_lag import watch_lag
from headrace.frontend.http.malloc import return_large
from headrace.frontend.http.tls import ServerTls
from headrace.frontend.metrics import Metrics
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.startup_app import StartupApp
from headrace.frontend.status import Lifecycle
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.connect import connect_patiently
from headrace.jetstream.errors import HeadraceError, JetStreamError
from headrace.jetstream.health import BrokerHealth
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import WORK_QUEUES, Topology

log = structlog.get_logger()

# On every answer: browsers must not guess its type, show it in a frame, tell other sites its address, or embed it elsewhere.
SECURITY_HEADERS = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
)
SWITCH_S = 0.001
STARTING_S = 0.002
HAND_BACK_S = 0.5  # before the end of the grace period, for jobs to go back to the queue
LAST_WORDS_S = 2  # after the grace period, for the events that tell clients
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run_frontend(
    settings: FrontendSettings,
    options: ConnectOptions,
    subjects: Subjects,
    *,
    batches: BatchSettings | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `on_listening` gets the base URL. Run it under uvloop, which halves the cost of a socket.

    Raises AddressUnavailable, and the ConnectError family if the broker cannot be used at the start.
    """
    listener = listen(settings)
    with contextlib.closing(listener):
        try:
            async with asyncio.TaskGroup() as group:
                front = StartupApp(Metrics(), Lifecycle())
                work = _Work(settings, batches or BatchSettings(), options, subjects, front)
                listening = asyncio.get_running_loop().create_future()
                working = group.create_task(work.run(listening, on_listening), name="work")
                await serve(front, settings, listener, drain=work.drain, on_listening=listening.set_result)
                working.cancel()
        except BaseExceptionGroup as group_error:
            if len(group_error.exceptions) == 1 and isinstance(group_error.exceptions[0], HeadraceError):
                raise group_error.exceptions[0] from None
            raise


class _Work:
    """Runs the ingress and the application behind the listener, once the broker can be used."""

    def __init__(
        self,
        settings: FrontendSettings,
        batches: BatchSettings,
        options: ConnectOptions,
        subjects: Subjects,
        front: StartupApp,
    ) -> None:
        self._settings = settings
        self._batches = batches
        self._options = options
        self._subjects = subjects
        self._front = front
        self._ingress: Ingress | None = None
        self._carrier: Carrier | None = None
        self._carried: FrontendBatches | None = None

    async def run(self, listening: asyncio.Future[str], on_listening: Callable[[str], None] | None) -> None:
        """Run until cancelled. `on_listening` is called once requests are accepted."""
        settings, subjects, front = self._settings, self._subjects, self._front
        topology = Topology(subjects)
        async with _connection(self._options, topology, settings, front) as work, asyncio.TaskGroup() as group:
            standing = BrokerHealth(work, topology, probe=True, on_mended=self._on_mended)
            ingress = self._ingress = Ingress(
                work,
                subjects,
                settings=IngressSettings(
                    no_worker_wait_s=settings.no_worker_wait_s,
                    slow_client_s=settings.slow_client_s,
                    gather_s=settings.sse_gather_s,
                    seals=bool(self._options.steward),
                ),
                namespace=settings.namespace,
                health=standing,
            )
            running = group.create_task(ingress.run(), name="ingress")
            looking = group.create_task(standing.run(), name="standing")
            limits = StoreLimits(
                ttl_s=settings.response_ttl_s,
                max_bytes=settings.response_max_bytes,
                write_timeout_s=settings.response_store_s,
            )
            files = FileStore(work, subjects, file_limits(settings))
            batches = self._carried = FrontendBatches(work, subjects, ingress, files, self._batches)
            quotas = QueueQuotas(
                work,
                subjects,
                QuotaLimits(jobs=settings.tenant_jobs, bytes=settings.tenant_job_bytes, tokens=settings.tenant_job_tokens),
                is_line=batches.view.has,
            )
            ring = KeyRing(settings)
            keys = KeyStore(work, subjects).watch(ring.apply)
            watching = group.create_task(keys.run(), name="keys")
            await keys.ready(settings.start_timeout_s)  # or revoked keys would be good, and keys not asked for
            ring.audited = True
            await work.subscribe(subjects.audit(), operator_acted)
            tokens = ring.tokens
            if tokens is not None:
                await tokens.load()
            frontend = build_frontend(
                ingress,
                settings,
                metrics=front.metrics,
                lifecycle=front.lifecycle,
                stores=Stores(
                    responses=ResponseStore(work, subjects, limits),
                    records=RecordIndex(work, subjects, ttl_s=settings.response_ttl_s),
                    jobs=StoredJobs(work, subjects, quotas),
                    uploads=UploadStore(work, subjects, files),
                    batches=batches.service,
                    results=ResultObjects(work, subjects),
                ),
                adapters=AdapterClient(work, subjects),
                ring=ring,
            )
            if frontend.stored_background is not None:
                work.on_reconnect(frontend.stored_background.store_again)
            share = QuotaShare(ring.quotas, work, subjects, me=ingress.id)
            watching_quotas = group.create_task(share.run(), name="quota_share")
            background = [running, looking, watching, watching_quotas]
            if frontend.tracer is not None:
                background.append(group.create_task(frontend.tracer.run(), name="traces"))
            if tokens is not None:
                background.append(group.create_task(tokens.run(), name="tokens"))
            background.append(group.create_task(frontend.model_cache.run(), name="model_cache"))
            background.append(group.create_task(FileSweeper(work, subjects).run(), name="files"))
            background.append(group.create_task(batches.run(), name="batches"))
            background.append(group.create_task(quotas.run(lambda: ingress.lease_held), name="quotas"))
            if settings.carry_jobs:
                carrier = self._carrier = Carrier(work, subjects, ingress, frontend.renderer, batches=batches)
                background.append(group.create_task(carrier.run(), name="carrier"))
            quiet_gc()
            share_evenly()
            return_large()
            front.open(frontend.app)
            try:
                url = await listening
                if on_listening is not None:
                    on_listening(url)
                await asyncio.Future()
            finally:
                frontend.model_cache.close()
                for task in background:
                    task.cancel()

    async def drain(self, grace_s: float) -> None:
        """Give up batches, and let open requests and carried jobs finish within the grace period.

        Jobs that have not ended go back to the queue.
        """
        try:
            await drain_parts(self._carrier, self._ingress, grace_s, batches=self._carried)
        except* HeadraceError as failed:
            log.warning("frontend.drain_failed", error=str(failed.exceptions[0]))

    def _on_mended(self, streams: frozenset[str]) -> None:
        queues = {self._subjects.stream(name) for name in WORK_QUEUES}
        if self._ingress is not None and streams & queues:  # messages in these streams are lost
            self._ingress.resubmit()


class Drained(Protocol):
    """A part that finishes its work within a grace period."""

    async def drain(self, grace_s: float, /) -> None: ...


async def drain_parts(
    carrier: Drained | None, ingress: Drained | None, grace_s: float, *, batches: Drained | None = None
) -> None:
    """Drain all at once; the carrier gives its jobs back while the ingress has its lease, without which it may not speak."""
    async with asyncio.TaskGroup() as group:
        if batches is not None:
            group.create_task(batches.drain(grace_s))
        if carrier is not None:
            group.create_task(carrier.drain(max(0.0, grace_s - HAND_BACK_S)))
        if ingress is not None:
            group.create_task(ingress.drain(grace_s))


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
    drain: Callable[[float], Awaitable[None]],
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve HTTP on `listener` until a signal arrives and running answers have ended; `drain(grace_s)` is awaited meanwhile."""
    connections = Connections(settings, frontend.metrics)
    tls = ServerTls(settings.tls_cert, settings.tls_key) if settings.tls_cert is not None else None
    _warn_of_plain_http(settings)
    server = _Server(
        uvicorn.Config(
            frontend.app,
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
    stop = asyncio.Event()
    with _signals(server, stop):
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server._serve(sockets=[listener]), name="http")
            stopping = group.create_task(stop.wait(), name="stop")
            background = [
                group.create_task(connections.sweep(), name="connections"),
                group.create_task(watch_lag(frontend.metrics.loop_lag.series()), name="lag"),
            ]
            if tls is not None:
                background.append(group.create_task(tls.watch(), name="tls"))
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
                await drain(settings.drain_grace_s)
            except HeadraceError as error:
                log.warning("frontend.drain_failed", error=str(error))
            await serving
            for task in background:
                task.cancel()
    log.info("frontend.stopped")


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
def _signals(server: uvicorn.Server, stop: asyncio.Event) -> Iterator[None]:
    """Handle signals: the first one starts the shutdown, the second one ends the wait for clients."""
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
async def _connection(
    options: ConnectOptions, topology: Topology, settings: FrontendSettings, front: StartupApp
) -> AsyncIterator[Connection]:
    """Open the connection that carries everything. A second one for token frames was measured slower (docs/performance.md)."""
    async with await connect_patiently(
        options, subjects=topology.subjects, timeout_s=settings.start_timeout_s, on_waiting=front.waiting
    ) as work:
        await ensure_topology(work, topology)

        async def ensure_again() -> None:  # memory streams do not survive a restart of the NATS server
            try:
                await ensure_topology(work, topology)
            except JetStreamError as error:  # the next reconnect tries again
                log.warning("topology.not_ensured", error=str(error))

        work.on_reconnect(ensure_again)
        yield work


def listen(settings: FrontendSettings) -> socket.socket:
    """Bind a socket to the configured address. Raises AddressUnavailable."""
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
    """Let threads release the interpreter to the event loop after one millisecond instead of five."""
    sys.setswitchinterval(SWITCH_S)


def quiet_gc() -> None:
    """Exclude objects made at the start from garbage collection, and collect the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
