"""Runs the frontend process: connections, ingress and HTTP server under one task group, started and stopped in order.

On SIGTERM the listener closes and running answers go on for the grace period. Answers that are still running then end with an
error saying that the server shuts down. A second signal ends the grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.durable.carrier import Carrier
from headrace.broker.durable.quota import QueueQuotas, QuotaLimits
from headrace.broker.durable.stored_jobs import StoredJobs
from headrace.broker.files.store import FileStore, FileSweeper
from headrace.broker.files.uploads import UploadStore
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.ingress.response_store import RecordIndex, ResponseStore, StoreLimits
from headrace.broker.keys import KeyStore
from headrace.broker.models.card_store import AdapterClient
from headrace.broker.models.cards import read_card_key
from headrace.broker.settings import IngressSettings, Timing, broker_wait_s
from headrace.broker.spill import ResultObjects
from headrace.frontend.apis import Stores, load_apis
from headrace.frontend.app import Frontend, build_frontend
from headrace.frontend.auth.key_ring import KeyRing, operator_acted
from headrace.frontend.auth.quotas import QuotaShare
from headrace.frontend.batches import FrontendBatches
from headrace.frontend.files import file_limits
from headrace.frontend.generation.endpoint import Lifecycle
from headrace.frontend.http.loop import return_large
from headrace.frontend.metrics import Metrics
from headrace.frontend.request_audit import audit_writer
from headrace.frontend.serving import Drain, Parts, listen, listen_alone, serve
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.status import StartupApp
from headrace.jetstream.client import Connection, ConnectOptions, connect_patiently
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.health import BrokerHealth
from headrace.jetstream.provision import bucket_copies, ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import WORK_QUEUES, Topology

log = structlog.get_logger()

SWITCH_S = 0.001
HAND_BACK_S = 0.5  # before the end of the grace period, for jobs to go back to the queue


async def run_frontend(
    settings: FrontendSettings,
    options: ConnectOptions,
    subjects: Subjects,
    *,
    batches: BatchSettings | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `on_listening` gets the base URL. Run it under uvloop, which halves the cost of a socket.

    Raises AddressUnavailable, SettingsError for an API that cannot be loaded, and the ConnectError family if the broker
    cannot be used at the start.
    """
    load_apis()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(listen(settings)))
        alone = [stack.enter_context(contextlib.closing(one)) for one in listen_alone(settings)]
        try:
            async with asyncio.TaskGroup() as group:
                front = StartupApp(Metrics(), Lifecycle())
                work = _Work(settings, batches or BatchSettings(), options, subjects, front)
                listening = asyncio.get_running_loop().create_future()
                working = group.create_task(work.run(listening, on_listening), name="work")
                await serve(front, settings, listener, drain=work.drain, on_listening=listening.set_result, more=alone)
                working.cancel()
        except BaseExceptionGroup as group_error:
            if len(group_error.exceptions) == 1 and isinstance(group_error.exceptions[0], HeadraceError):
                raise group_error.exceptions[0] from None
            raise


class _Work:
    """The parts behind the listener: the ingress and the application's, once the broker can be used."""

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
        self._parts: Parts | None = None

    async def run(self, listening: asyncio.Future[str], on_listening: Callable[[str], None] | None) -> None:
        """Run until cancelled. `on_listening` is called once requests are accepted."""
        topology = Topology(self._subjects, replicas=self._options.replicas)
        async with _connection(self._options, topology, self._settings, self._front) as work, asyncio.TaskGroup() as group:
            self._parts = Parts(group)
            frontend = await self._start(self._parts, work, topology)
            quiet_gc()
            share_evenly()
            return_large()
            self._front.open(frontend.app)
            try:
                url = await listening
                if on_listening is not None:
                    on_listening(url)
                await asyncio.Future()
            finally:
                frontend.site.model_cache.close()
                self._parts.stop()

    async def _start(self, parts: Parts, work: Connection, topology: Topology) -> Frontend:
        settings, subjects, front = self._settings, self._subjects, self._front
        standing = BrokerHealth(work, topology, probe=True, on_mended=self._on_mended)
        copies = await bucket_copies(work, subjects.bucket("members"))
        ingress = self._ingress = Ingress(
            work,
            subjects,
            settings=IngressSettings(
                timing=Timing().at_copies(copies),
                broker_wait_s=broker_wait_s(copies) if settings.broker_wait_s is None else settings.broker_wait_s,
                no_worker_wait_s=settings.no_worker_wait_s,
                slow_client_s=settings.slow_client_s,
                gather_s=settings.sse_gather_s,
                seals=bool(self._options.steward),
                card_key=read_card_key(settings.card_key or self._options.card_key),
            ),
            namespace=settings.namespace,
            health=standing,
        )
        parts.start("ingress", ingress.run, ingress.drain)
        parts.start("standing", standing.run)
        limits = StoreLimits(
            ttl_s=settings.response_ttl_s,
            max_bytes=settings.response_max_bytes,
            write_timeout_s=settings.response_store_s,
        )
        files = FileStore(work, subjects, file_limits(settings))
        batches = FrontendBatches(work, subjects, ingress, files, self._batches)
        quotas = QueueQuotas(
            work,
            subjects,
            QuotaLimits(jobs=settings.tenant_jobs, bytes=settings.tenant_job_bytes, tokens=settings.tenant_job_tokens),
            is_line=batches.view.has,
        )
        ring = KeyRing(settings)
        keys = KeyStore(work, subjects).watch(ring.apply)
        parts.start("keys", keys.run)
        await keys.ready(settings.start_timeout_s)  # or revoked keys would be good, and keys not asked for
        ring.audited = True
        await work.subscribe(subjects.audit(), operator_acted)
        tokens = ring.tokens
        if tokens is not None:
            await tokens.load()
        writer = await audit_writer(work, topology, settings, front.metrics, frontend=ingress.id)
        responses = ResponseStore(work, subjects, limits)
        records = RecordIndex(work, subjects, ttl_s=settings.response_ttl_s)
        frontend = build_frontend(
            ingress,
            settings,
            metrics=front.metrics,
            lifecycle=front.lifecycle,
            stores=Stores(
                responses=responses,
                records=records,
                jobs=StoredJobs(work, subjects, quotas),
                uploads=UploadStore(work, subjects, files),
                batches=batches.service,
                results=ResultObjects(work, subjects),
                notes=writer,
            ),
            adapters=AdapterClient(work, subjects),
            ring=ring,
        )
        for again in frontend.site.on_reconnect:
            work.on_reconnect(again)
        parts.start("quota_share", QuotaShare(ring.quotas, work, subjects, me=ingress.id).run)
        parts.start("responses", responses.room.run)
        parts.start("records", records.room.run)
        if writer is not None:
            parts.start("audit", writer.run)
        if frontend.site.tracer is not None:
            parts.start("traces", frontend.site.tracer.run)
        if tokens is not None:
            parts.start("tokens", tokens.run)
        parts.start("model_cache", frontend.site.model_cache.run)
        parts.start("files", FileSweeper(work, subjects).run)
        parts.start("batches", batches.run, batches.drain)
        parts.start("quotas", partial(quotas.run, lambda: ingress.lease_held))
        if settings.carry_jobs:
            carrier = Carrier(work, subjects, ingress, frontend.renderer, batches=batches)
            parts.start("carrier", carrier.run, partial(hand_back, carrier.drain))
        return frontend

    async def drain(self, grace_s: float) -> None:
        """Give up batches, and let open requests and carried jobs finish within the grace period."""
        try:
            if self._parts is not None:
                await self._parts.drain(grace_s)
        except* HeadraceError as failed:
            log.warning("frontend.drain_failed", error=str(failed.exceptions[0]))

    def _on_mended(self, streams: frozenset[str]) -> None:
        queues = {self._subjects.stream(name) for name in WORK_QUEUES}
        if self._ingress is not None and streams & queues:  # messages in these streams are lost
            self._ingress.resubmit()


async def hand_back(drain: Drain, grace_s: float) -> None:
    """Drain the carrier: it gives its jobs back while the ingress has its lease, without which it may not speak."""
    await drain(max(0.0, grace_s - HAND_BACK_S))


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


def share_evenly() -> None:
    """Let threads release the interpreter to the event loop after one millisecond instead of five."""
    sys.setswitchinterval(SWITCH_S)


def quiet_gc() -> None:
    """Exclude objects made at the start from garbage collection, and collect the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
