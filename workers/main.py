"""Runs a worker process: starts the engine, warms it up, registers, serves, drains."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog

from headrace.base.process import ending_signals
from headrace.broker.membership.members import ANY_WORKER, worker_id
from headrace.broker.models.cards import read_card_key
from headrace.broker.part_state import PartState
from headrace.broker.settings import SessionSettings, Timing
from headrace.broker.spill import ResultObjects
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.session import WorkerSession
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.client import Connection, ConnectOptions, connect_patiently
from headrace.jetstream.dial import address_of_route
from headrace.jetstream.provision import bucket_copies, ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers import metrics
from headrace.workers.adapter_cache import AdapterCache, AdapterFolder, default_cache
from headrace.workers.adapter_files import AdapterFiles, AdapterLimits, open_engine_adapters
from headrace.workers.adapter_source import AllowedSources
from headrace.workers.blocking import run_in_thread
from headrace.workers.detokenize import first_token
from headrace.workers.encoding.server import EncodeServer
from headrace.workers.encoding.wiring import NixlPart, embedding_source, encode_server, lent_memory, make_store, record_reader
from headrace.workers.engine import Engine, EngineConfig, EngineInfo, Role, Sink
from headrace.workers.engine_registry import create, parser_family
from headrace.workers.errors import EngineDead, EngineStartFailed
from headrace.workers.kv.feed import KvFeed
from headrace.workers.kv.publisher import create_cache_events
from headrace.workers.model_files import read_template, served_name
from headrace.workers.operations import EngineOperator, SetLogLevel, WorkerHealth, parallel_facts
from headrace.workers.parsing.selection import ParserChoice, ParserFamily, choose
from headrace.workers.probes import Canary, EngineProbe, warm_up
from headrace.workers.registration import (
    CardKeeper,
    build_card,
    build_member,
    read_card_files,
    refuse_mixed_engines,
    refuse_used_login,
    register_card,
    with_longest_context,
)
from headrace.workers.runtime.handover import Handovers, create_prefill_side
from headrace.workers.runtime.runtime import EngineAdapters, Runtime
from headrace.workers.settings import WorkerSettings
from headrace.workers.tokens import token_table

# Runs the worker of a node that computes a part of an engine of several nodes, which the worker of its first node serves.
#
# It is registered nowhere and takes no requests. It serves the metrics of its part, and ends when its part does: the parts of
# an engine start and end together, and whatever started it starts it again for the next one.

log = structlog.get_logger()


async def follow(engine: Engine, info: EngineInfo) -> None:
    """Wait until a stop signal comes. Raises EngineDead when the engine ends before that."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = ending_signals()
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    stopping, dying = asyncio.create_task(stop.wait()), asyncio.create_task(engine.died())
    log.info("worker.follows", engine=info.engine, meaning="requests go to the first node of this engine")
    try:
        await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            raise EngineDead(dying.result())
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        for task in (stopping, dying):
            task.cancel()


ENGINE_STOP_GRACE_S = 10.0
Part = KvFeed | Handovers | CardKeeper | Canary | WorkerHealth | EncodeServer | NixlPart
"""What runs beside the session and the runtime."""
STEPS_AHEAD = 2  # engine steps of work that a prefill worker accepts at once: one runs, one waits
STEP_TOKENS = 8192  # tokens of a step, for an engine that does not report them


@dataclass(frozen=True)
class StartedEngine:
    """A warmed-up engine with its runtime and the parsers chosen for its answers."""

    engine: Engine
    info: EngineInfo
    runtime: Runtime
    family: ParserFamily
    parsers: ParserChoice
    token: int  # with which the model's prompts begin
    template: bytes | None  # the operator's chat template
    adapters: Mapping[str, AdapterFolder]  # those of its start


@dataclass(frozen=True)
class OfProcess:
    """The means of the process that the worker runs in: what orchestrators are told, and how the log level is changed."""

    state: PartState
    set_log_level: SetLogLevel | None


async def run_worker(
    settings: WorkerSettings,
    options: ConnectOptions,
    subjects: Subjects,
    *,
    state: PartState | None = None,
    set_log_level: SetLogLevel | None = None,
) -> None:
    """Run a worker until it is drained. `state` is told how it stands, `set_log_level` changes this process's log level.

    Raises EngineStartFailed, RegistrationRefused or a ConnectError before serving, and EngineDead after the engine has died
    and its work was handed over.
    """
    state = state or PartState("worker")
    read_card_key(settings.card_key or options.card_key)
    # Fail before a model is loaded: a missing server is an error, while a server without JetStream is waited for.
    async with await connect_patiently(options, subjects=subjects, timeout_s=0.0) as connection:
        await ensure_topology(connection, Topology(subjects, replicas=options.replicas))
        files = _adapter_files(settings, connection, subjects)
        state.starts("adapters of the start are being fetched")
        engine_args, folders = await open_engine_adapters(files, settings.engine_args)
    settings = replace(settings, engine_args=engine_args)
    engine, family = create(settings.engine), parser_family(settings.engine)
    path = settings.chat_template
    template = await run_in_thread(lambda: read_template(path), name="chat-template") if path else None
    parsers = await _choose_parsers(family, settings)
    runtime = Runtime(engine, stall_s=settings.stall_s, first_token_s=settings.first_token_s, token_s=settings.token_s)
    started = time.monotonic()
    peer_host = settings.peer_host or await address_of_route(options.servers)
    state.starts(f"engine {settings.engine!r} is starting")
    info = await _start(engine, settings, parsers, runtime.on_step, peer_host)
    try:
        if info.follows:
            await follow(engine, info)
            return
        token = await run_in_thread(lambda: first_token(info.tokenizer_dir, vocab_size=info.vocab_size), name="first-token")
        state.starts("the engine is being warmed up")
        await warm_up(engine, runtime, info, token=token, role=Role(settings.role), timeout_s=settings.start_timeout_s)
        state.starts("the worker is being registered")
        metrics.ENGINE_START_S.set(time.monotonic() - started)
        facts = {"engine": info.engine, "version": info.version, **parallel_facts(info)}
        log.info("engine.started", **facts, took_s=round(time.monotonic() - started, 1))
        started_engine = StartedEngine(engine, info, runtime, family, parsers, token, template, folders)
        await _serve(settings, options, subjects, started_engine, OfProcess(state, set_log_level))
    finally:
        await engine.stop(ENGINE_STOP_GRACE_S)


async def _choose_parsers(family: ParserFamily, settings: WorkerSettings) -> ParserChoice:
    """Choose the parsers, for workers of every role: a role may change, and the last worker to join writes the pool's card."""

    def work() -> ParserChoice:
        return choose(
            family,
            tool=settings.tool_parser,
            reasoning=settings.reasoning_parser,
            model=settings.model,
            args=settings.engine_args,
        )

    try:
        async with asyncio.timeout(settings.start_timeout_s):
            return await run_in_thread(work, name="parsers")
    except TimeoutError:
        raise EngineStartFailed(f"the parsers could not be chosen within {settings.start_timeout_s:g} s") from None


async def _start(engine: Engine, settings: WorkerSettings, parsers: ParserChoice, sink: Sink, peer_host: str) -> EngineInfo:
    args = dict(settings.engine_args)
    if settings.engine in ("vllm", "sglang") and parsers.reasoning is not None:
        args["reasoning_parser"] = parsers.reasoning  # Structured output then begins after the reasoning.
    config = EngineConfig(
        model=settings.model,
        served_name=settings.served_name or settings.model,
        role=Role(settings.role),
        args=args,
        peer_host=peer_host,
    )
    try:
        async with asyncio.timeout(settings.start_timeout_s):
            return await engine.start(config, sink)
    except TimeoutError:
        raise EngineStartFailed(f"engine {settings.engine!r} did not start within {settings.start_timeout_s:g} s") from None


async def _serve(
    settings: WorkerSettings,
    options: ConnectOptions,
    subjects: Subjects,
    started: StartedEngine,
    process: OfProcess,
) -> None:
    engine, info, runtime, parsers = started.engine, started.info, started.runtime, started.parsers
    files = await run_in_thread(lambda: read_card_files(info.tokenizer_dir, template=started.template), name="card-files")
    table = await run_in_thread(lambda: token_table(info.tokenizer_dir), name="token-table")
    async with contextlib.AsyncExitStack() as stack:
        connection = await stack.enter_async_context(_connected(options, subjects))
        frames = await stack.enter_async_context(_connected(options, subjects)) if settings.separate_frames else None
        wanted = build_card(settings, served_name(settings) or info.engine, info, files, parsers)
        await refuse_mixed_engines(connection, subjects, pool=wanted.pool, engine=info.engine, fleet=settings.fleet)
        wanted = await with_longest_context(connection, subjects, wanted, fleet=settings.fleet)
        key = read_card_key(settings.card_key or options.card_key)
        engine_block = info.block_size if settings.fleet else 0
        card = await register_card(connection, subjects, wanted, files, key=key, engine_block=engine_block)
        wanted = msgspec.structs.replace(wanted, block_size=card.block_size)
        keeper = CardKeeper(connection, subjects, wanted, files, key=key)
        member = build_member(settings, worker_id(settings.worker_name, options.worker), card, info, engine.capabilities)
        if options.worker not in (None, ANY_WORKER):
            await refuse_used_login(connection, subjects, pool=member.pool, worker=member.worker)
        if options.worker:  # its login may publish to subjects that name its pool and itself
            subjects = subjects.spoken_by(member.pool, member.worker)
        structlog.contextvars.bind_contextvars(worker=member.worker)
        events = create_cache_events(connection, subjects, engine, info, member, pool_block=card.block_size)
        runtime.watch_cache(*events.caches, tiers=events.tiers)
        prefill = create_prefill_side(engine, info, runtime, worker=member.worker, caches=events.caches)
        await make_store(connection, subjects, info, member.pool)
        lending = await lent_memory(settings, member.worker)
        reader = await record_reader(settings, info, member.worker)
        encoder = encode_server(settings, engine, info, connection, subjects, member, lending)
        timing = Timing().at_copies(await bucket_copies(connection, subjects.bucket("members")))
        deps = WorkerDeps(
            messaging=connection,
            subjects=subjects,
            settings=_session_settings(settings, info, timing),
            frames=frames,
            secret=secrets.token_hex(16) if connection.options.steward else "",
            pool_secret=options.secret_of(member.pool),
            revokes=options.worker in (None, ANY_WORKER),
        )
        probe = EngineProbe(engine, runtime, info, token=started.token)

        async def warm(role: str) -> None:
            await warm_up(engine, runtime, info, token=started.token, role=Role(role), timeout_s=settings.start_timeout_s)

        ports = EnginePorts(
            executor=runtime,
            kv=events.port,
            prefill=prefill,
            encode=encoder,
            set_role=runtime.set_role,
            adapters=EngineAdapters(
                engine,
                runtime.watchdog,
                _adapter_files(settings, connection, subjects),
                folders=started.adapters,
            ),
            operations=EngineOperator(engine, runtime, info, probe, warm=warm, set_log_level=process.set_log_level),
        )
        session = WorkerSession(deps, member, ports)

        handovers = Handovers(session, engine, info, runtime, settings)
        runtime.attach(
            session.runs,
            info,
            table,
            handovers.coordinator,
            parsers=started.family.build(engine, info, table, parsers),
            results=ResultObjects(connection, subjects, sealed=bool(options.steward)),
            embeddings=embedding_source(settings, info, session, connection, subjects, reader),
        )
        canary = Canary(
            probe,
            runtime,
            idle_s=settings.canary_s,
            timeout_s=settings.canary_timeout_s,
            serving=lambda: session.presence.taking and session.presence.lease.held,
        )
        health = WorkerHealth(process.state, session, engine, runtime, info, card)
        others: list[Part] = [*events.feeds, handovers, keeper, canary, health]
        others += [part for part in (encoder, lending, reader) if part is not None]
        await _run_session(settings, session, runtime, others, card.model)


@contextlib.asynccontextmanager
async def _connected(options: ConnectOptions, subjects: Subjects) -> AsyncIterator[Connection]:
    async with await Connection.connect(options, subjects=subjects) as connection:

        async def restore() -> None:
            await ensure_topology(
                connection, Topology(subjects, replicas=options.replicas)
            )  # Memory streams vanish with a server restart.

        connection.on_reconnect(restore)
        yield connection


def _adapter_files(settings: WorkerSettings, connection: Connection, subjects: Subjects) -> AdapterFiles:
    limits = AdapterLimits(allowed=AllowedSources(settings.adapter_sources), most_bytes=settings.adapter_max_bytes)
    folder = Path(settings.adapter_cache) if settings.adapter_cache is not None else default_cache(os.environ)
    cache = AdapterCache(folder, most_bytes=settings.adapter_cache_bytes)
    return AdapterFiles(limits, cache, connection.objects(subjects.bucket("adapters")))


def _session_settings(settings: WorkerSettings, info: EngineInfo, timing: Timing) -> SessionSettings:
    return SessionSettings(
        slots=info.slots,
        drain_grace_s=settings.drain_grace_s,
        adapter_slots=settings.adapter_slots,
        timing=timing,
        prefill_budget_tokens=settings.prefill_budget_tokens or STEPS_AHEAD * (info.step_tokens or STEP_TOKENS),
    )


async def _run_session(
    settings: WorkerSettings,
    session: WorkerSession,
    runtime: Runtime,
    others: list[Part],
    model: str,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        beside = [tasks.create_task(part.run()) for part in (runtime, *others)]
        serving = tasks.create_task(session.run())
        with _signals(tasks, session, serving, settings.drain_grace_s):
            await session.wait_registered(settings.start_timeout_s)
            _quiet_gc()
            metrics.READY.set(1)
            log.info(
                "worker.ready", worker=session.presence.worker, engine=settings.engine, model=model, pool=session.presence.pool
            )
            endings: set[asyncio.Future[Any]] = {serving, runtime.dead}
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            metrics.READY.set(0)
            if runtime.dead.done() and not serving.done():
                await session.service.engine_died(runtime.dead.result(), runtime.blamed())
            await asyncio.wait({serving})
            for task in beside:
                task.cancel()
    if runtime.dead.done():
        raise EngineDead(runtime.dead.result())
    log.info("worker.stopped", worker=session.presence.worker)


def _quiet_gc() -> None:
    """Have the garbage collector scan less often, and never the objects of the start: rows and messages hold no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@contextlib.contextmanager
def _signals(tasks: asyncio.TaskGroup, session: WorkerSession, serving: asyncio.Task[None], grace_s: float) -> Iterator[None]:
    """Handle signals: SIGTERM and SIGHUP drain, SIGINT hands over at once, a second signal stops without either."""
    loop = asyncio.get_running_loop()

    def leave(within_s: float) -> None:
        if session.presence.draining:
            serving.cancel()
        else:
            tasks.create_task(session.service.drain(within_s))

    numbers = ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, leave, 0.0 if number == signal.SIGINT else grace_s)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
