"""Runs the parts of a deployment: checks, logging, settings, probes, and the exit code of an error."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from importlib import import_module
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any, TextIO, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
import structlog
from prometheus_client import make_wsgi_app

from headrace.base import logs
from headrace.base.errors import (
    EXIT_CONFIGURATION,
    EXIT_ENGINE_DIED,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    CommandError,
    HeadraceError,
    SettingsError,
    StartFailed,
)
from headrace.base.process import PRIVATE_FOLDER, make_files_private
from headrace.broker.errors import CardKeyUnusable
from headrace.broker.part_state import Answer, PartState
from headrace.config.build_settings import (
    batch_settings,
    bundled_model_dir,
    connect_options,
    engine_arguments,
    frontend_settings,
    needs_bundled_model,
    router_options,
    scheduler_settings,
    subjects,
    worker_settings,
)
from headrace.config.settings import Settings
from headrace.config.values import take_secrets
from headrace.jetstream.errors import (
    AccessDenied,
    JetStreamDisabled,
    ServerTooOld,
    ServerUnreachable,
    SubjectError,
    TopologyError,
)
from headrace.up.process import end_with_supervisor
from headrace.up.server_logins import every_pool, worker_login
from headrace.up.worker_plan import worker_counts, worker_python
from headrace.workers.errors import EngineStartFailed
from headrace.workers.process_guard import TreeGuard

if TYPE_CHECKING:
    from headrace.up.terminal import Terminal


PATIENCE_S = 10.0  # a client that sends nothing for so long is let go


class ProbeServer(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread, so that one slow client does not keep the kubelet waiting."""

    daemon_threads = True


class ProbeHandler(WSGIRequestHandler):
    """Handles a request without a line in the log, and lets go of a client that sends nothing."""

    timeout = PATIENCE_S

    def log_message(self, *_line: Any) -> None:
        """Log nothing: probes come every second."""


def probe_app(state: PartState) -> Callable[..., Iterable[bytes]]:
    metrics = make_wsgi_app()
    answers: dict[str, Callable[[], Answer]] = {"/live": state.live, "/ready": state.ready, "/health": state.health}

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            result: Iterable[bytes] = metrics(environ, start_response)
            return result
        answer = answers.get(path)
        if answer is None:
            found = Answer(False, {"error": f"there are {', '.join([*answers, '/metrics'])}"})
            status = "404 Not Found"
        else:
            found = answer()
            status = "200 OK" if found.ok else "503 Service Unavailable"
        start_response(status, [("content-type", "application/json"), ("cache-control", "no-store")])
        return [msgspec.json.encode(found.body)]

    return app


def serve_probes(host: str, port: int, state: PartState) -> int:
    """Serve in a thread that ends with the process. Returns the port. Raises OSError when the address cannot be used."""
    server = make_server(host, port, probe_app(state), ProbeServer, ProbeHandler)
    Thread(target=server.serve_forever, name="probes", daemon=True).start()
    return int(server.server_port)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PROBE_BYTES = 4 << 20  # what the NATS server writes in its first seconds


def check_up(settings: Settings) -> None:
    """Check the data folder and, if `up` is to run workers, their engine. Raises SettingsError or StartFailed.

    An engine with an environment of its own is checked by its workers, which run there.
    """
    check_exposure(settings)
    check_logins(settings)
    check_data_folder(settings)
    for _, pool in every_pool(settings):
        if not sum(worker_counts(pool).values()):
            continue
        check_model_sources(pool)
        if worker_python(pool["worker.engine"]) == sys.executable:
            check_engine(pool)


def check_exposure(settings: Settings) -> None:
    """Refuse to listen unprotected where other machines reach the port. Raises SettingsError that says what to do."""
    from headrace.frontend.auth.caller import exposure_problem, is_loopback

    problem = exposure_problem(frontend_settings(settings))
    if problem is not None:
        raise SettingsError(f"frontend.host = {settings['frontend.host']!r} ({settings.source('frontend.host')}): {problem}")
    if settings.command != "up" or settings["nats.url"] or settings["nats.context"]:
        return
    host = settings["server.host"]
    if not is_loopback(host) and settings["server.login"] == "none" and not settings["frontend.insecure"]:
        raise SettingsError(
            f"server.host = {host!r} ({settings.source('server.host')}): the embedded NATS server asks for no login, and "
            f"{host} can be reached from other machines: give --nats-login one or roles, --nats with a server that has "
            "users, or --insecure to serve all who reach it"
        )


def check_logins(settings: Settings) -> None:
    """Refuse tenants that would get no login, and workers whose login would let them read the requests of other pools.

    The login of a worker has the name of its pool. Raises SettingsError.
    """
    own_server = not settings["nats.url"] and not settings["nats.context"]
    if settings["server.tenants"] and not (own_server and settings["server.login"] == "roles"):
        raise SettingsError(
            f"server.tenants = {list(settings['server.tenants'])!r} ({settings.source('server.tenants')}): only the embedded "
            "NATS server gives tenants a login of their own, and only with --nats-login roles"
        )
    if not own_server or settings["server.login"] != "roles":
        return
    pools = [(name, pool) for name, pool in every_pool(settings) if sum(worker_counts(pool).values())]
    for name, pool in pools if len(pools) > 1 else ():
        if not worker_login(pool).scope:
            which = f"pool {name!r}" if name else "the first pool"
            raise SettingsError(
                f"{which}: only its engine {pool['worker.engine']!r} knows the name of its model, so that its "
                "workers would need a login at NATS with which they read the requests of all pools: "
                "give it a name (--served-name), or --nats-login one"
            )


def check_worker(settings: Settings) -> None:
    """Check the engine of a worker, and ask the model hub for a model that is not here. Raises SettingsError."""
    check_model_sources(settings)
    check_engine(settings)
    model = settings["worker.model"]
    if settings["worker.engine"] in ("vllm", "sglang") and model is not None:
        from headrace.workers.model_files import check_hub_model

        _named(settings, "worker.model", lambda: check_hub_model(model, settings["worker.engine_args"], os.environ))


def check_model_sources(settings: Settings) -> None:
    """Refuse a model, and what an engine's settings have it load, from where `worker.model_sources` does not allow.

    The simulator loads nothing, and the bundled model is checked by its digest. Raises SettingsError naming the wrong setting.
    """
    if settings["worker.engine"] == "sim":
        return
    from headrace.workers.settings import check_loaded_sources, check_model_source

    model, rules = settings["worker.model"], settings["worker.model_sources"]
    if model:
        _named(settings, "worker.model", lambda: check_model_source(model, rules))
    _named(settings, "worker.engine_args", lambda: check_loaded_sources(settings["worker.engine_args"], rules))


def check_engine(settings: Settings) -> None:
    """Check all that this machine alone can tell of the engine's settings. Raises SettingsError naming the wrong one.

    An engine of the operator's own is not checked: it says itself what is wrong when it starts.
    """
    engine = settings["worker.engine"]
    if engine == "sim":
        from headrace.workers.sim.settings import parse_settings

        _named(settings, "worker.engine_args", lambda: parse_settings(engine_arguments(settings)))
    if engine not in ("vllm", "sglang", "trtllm"):
        return
    checks = import_module(f"headrace.workers.{engine}.settings").SETTINGS
    _named(settings, "worker.engine", checks.check_packages)
    _check_model_path(settings)
    _named(settings, "worker.engine_args", lambda: checks.check_arguments(settings["worker.engine_args"]))
    if engine == "vllm":
        from headrace.workers.vllm.settings import check_compiler

        _named(settings, "worker.engine_args", lambda: check_compiler(engine_arguments(settings), os.environ))
    if needs_bundled_model(settings):
        check_conversion(settings)


def _check_model_path(settings: Settings) -> None:
    from headrace.workers.model_files import check_model_path

    model = settings["worker.model"]
    if model is not None:
        _named(settings, "worker.model", lambda: check_model_path(model))


def check_conversion(settings: Settings) -> None:
    """Check that the bundled model is there, or that what converts it is installed. Raises SettingsError."""
    from headrace.workers.bundled_model import is_ready
    from headrace.workers.vllm.settings import SETTINGS

    if not is_ready(bundled_model_dir(settings)):
        _named(settings, "worker.engine", lambda: SETTINGS.check_packages("torch", "transformers", "gguf", "accelerate"))


def check_data_folder(settings: Settings) -> None:
    """Take some room in the data folder and give it back.

    Raises SettingsError for a folder that cannot be written, StartFailed for a full disk.
    """
    folder = Path(settings["data_dir"]).resolve()
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)  # the run file closes one that was open to others
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, _PROBE_BYTES)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StartFailed(
                f"the disk of the data folder {folder} is full ({error.strerror}): free some space or choose another --data-dir"
            ) from None
        source = settings.source("data_dir")
        raise SettingsError(f"data_dir = {str(folder)!r} ({source}): cannot be written: {error.strerror}") from None


def _named(settings: Settings, key: str, check: Callable[[], object]) -> None:
    """Run a check. Raises SettingsError with the key, its value, with secrets masked, and where that is from."""
    try:
        check()
    except EngineStartFailed as error:
        shown = settings.masked().get(key, settings[key])
        raise SettingsError(f"{key} = {shown!r} ({settings.source(key)}): {error}") from None


_log = structlog.get_logger()

# What no restart cures.
_CONFIGURATION = (AccessDenied, CardKeyUnusable, JetStreamDisabled, ServerTooOld, SubjectError, TopologyError)


def run_up(settings: Settings) -> int:
    """Run `headrace up`. Raises CommandError."""
    end_with_supervisor()  # of `headrace demo`
    from headrace.up.supervisor import Supervisor

    check_up(settings)
    terminal, chosen = _terminal(settings)
    colour = chosen == "console" and logs.wants_colour(sys.stderr)
    logs.configure(log_format=chosen, level=settings["log.level"], fields={"component": "up"}, stream=cast("TextIO", terminal))
    _announce(settings)
    make_files_private()
    part_env = {
        **take_secrets(os.environ),
        **settings.environment(),
        "HEADRACE_LOG_FORMAT": chosen,
        **({"FORCE_COLOR": "1"} if colour else {}),
    }
    try:
        return asyncio.run(Supervisor(settings, terminal=terminal, part_env=part_env).run())
    finally:
        terminal.close()


def _terminal(settings: Settings) -> tuple[Terminal, logs.Format]:
    """Return what `up` writes its log to, and the format of the log.

    On a terminal that is a few lines, and the whole log goes to a file, unless the settings ask for the log.
    """
    from headrace.up.terminal import Terminal

    asked = settings["up.verbose"] or settings.given("log.format") or settings.given("log.level")
    if not asked and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from headrace.up.terminal import open_short_terminal

        return open_short_terminal(settings, sys.stderr), "json"
    chosen = logs.choose_format(settings["log.format"], sys.stderr)
    stream = cast("TextIO", logs.in_thread())
    return Terminal(stream, json_lines=chosen == "json", colour=logs.wants_colour(sys.stderr)), chosen


def run_frontend(settings: Settings) -> int:
    """Run `headrace frontend`. Raises SettingsError."""
    start_part(settings, {"component": "frontend"})
    composed, batches, options, names = (
        frontend_settings(settings),
        batch_settings(settings),
        connect_options(settings, name="headrace frontend"),
        subjects(settings),
    )

    def start() -> Coroutine[Any, Any, int | None]:
        check_exposure(settings)
        from headrace.frontend.server import run_frontend as run

        return run(composed, options, names, batches=batches)

    return run_part(settings, start)


def run_worker(settings: Settings) -> int:
    """Run `headrace worker`. Raises SettingsError."""
    name = settings["worker.name"]
    chosen = start_part(settings, {"component": "worker", **({"worker": name} if name else {})})
    logs.prepare_engine_processes(log_format=chosen, level=settings["log.level"])
    composed = worker_settings(settings)
    options = connect_options(settings, name=f"headrace worker {name or ''}".rstrip())
    names = subjects(settings)

    def start() -> Coroutine[Any, Any, int | None]:
        check_worker(settings)
        state = PartState("worker")
        offer_probes(composed.metrics_host, composed.metrics_port, state, default=probe_port(settings, "worker"))
        if needs_bundled_model(settings):
            _prepare_model(settings)
        from headrace.workers.main import run_worker as run

        return run(composed, options, names, state=state, set_log_level=logs.set_level)

    with TreeGuard():
        return run_part(settings, start)


def run_router(settings: Settings) -> int:
    """Run `headrace router`. Raises SettingsError."""
    name = settings["router.name"]
    start_part(settings, {"component": "router", **({"router": name} if name else {})})
    composed = router_options(settings)
    deciding = scheduler_settings(settings)
    options = connect_options(settings, name=f"headrace router {name or ''}".rstrip())
    names = subjects(settings)

    def start() -> Coroutine[Any, Any, int | None]:
        from headrace.router.main import builder
        from headrace.router.main import run_router as run

        state = PartState("router")
        offer_probes(composed.metrics_host, composed.metrics_port, state, default=probe_port(settings, "router"))
        return run(composed, options, names, builder(composed, deciding), state=state)

    return run_part(settings, start)


PROBE_PORTS = {"worker": 9100, "router": 9101}


def probe_port(settings: Settings, part: str) -> int | None:
    """Return the port for a part that is given an address for its probes and no port, as in a pod; None without an address."""
    return PROBE_PORTS[part] if settings.given(f"{part}.metrics_host") else None


def offer_probes(host: str, port: int | None, state: PartState, *, default: int | None) -> None:
    """Serve `/live`, `/ready`, `/health` and `/metrics` of a part, if a port is set or there is a `default`.

    Raises StartFailed when the port is taken.
    """

    port = default if port is None else port
    if port is None:
        return
    try:
        port = serve_probes(host, port, state)
    except OSError as error:
        raise StartFailed(f"metrics port {port} of {host} cannot be used: {error}") from error
    _log.info("metrics.listening", host=host, port=port)


def run_model_prepare(settings: Settings) -> int:
    """Run `headrace model prepare`: print the folder of the bundled model."""
    start_part(settings, {"component": "model"})
    check_conversion(settings)
    try:
        sys.stdout.write(f"{_prepare_model(settings)}\n")
    except HeadraceError as error:
        return _fail(settings, error)
    return EXIT_OK


def exit_code(error: BaseException) -> int:
    from headrace.frontend.errors import AddressUnavailable, CertificateUnusable, SigningKeysUnusable
    from headrace.router.errors import SettingsInvalid
    from headrace.workers.errors import (
        EngineDead,
        EngineStartFailed,
        ModelUnavailable,
        RegistrationRefused,
        UnsupportedByEngine,
    )

    configuration = (
        *_CONFIGURATION,
        AddressUnavailable,
        CertificateUnusable,
        EngineStartFailed,
        ModelUnavailable,
        RegistrationRefused,
        SettingsInvalid,
        SigningKeysUnusable,
        UnsupportedByEngine,
    )
    if isinstance(error, CommandError):
        return error.exit_code
    if isinstance(error, ServerUnreachable):
        return EXIT_UNAVAILABLE
    if isinstance(error, EngineDead):
        return EXIT_ENGINE_DIED
    if isinstance(error, configuration):
        return EXIT_CONFIGURATION
    return EXIT_FAILURE


def start_part(settings: Settings, fields: dict[str, str]) -> str:
    """Prepare the process of a part: its log, its files, its secrets. Returns the format of its log."""
    end_with_supervisor()
    make_files_private()
    take_secrets(os.environ)  # an engine's processes inherit the rest
    from headrace.broker import metrics

    log = logs.in_thread()
    log.on_lost = metrics.LOG_LOST.inc
    stream = cast("TextIO", log)
    chosen = logs.configure(log_format=settings["log.format"], level=settings["log.level"], fields=fields, stream=stream)
    _announce(settings)
    return chosen


def _announce(settings: Settings) -> None:
    for warning in settings.warnings:
        _log.warning("settings.unknown", detail=warning)
    file = {"file": str(settings.file)} if settings.file else {}
    _log.info("settings.loaded", **file, **_flat(settings.masked()))


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "_"): list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _prepare_model(settings: Settings) -> Path:
    from headrace.workers.bundled_model import NAME, is_ready, prepare

    folder = bundled_model_dir(settings)
    if not is_ready(folder):
        prepare(folder, progress=lambda step: _log.info("model.preparing", step=step))
        _log.info("model.prepared", name=NAME, folder=str(folder))
    return folder


def run_part(settings: Settings, start: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run a part to its end on the fastest event loop there is."""
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(start()) or EXIT_OK
    except BaseExceptionGroup as group:
        wanted, others = group.split(HeadraceError)
        if wanted is None or others is not None:
            raise
        return _fail(settings, _first(wanted))
    except HeadraceError as error:
        return _fail(settings, error)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(settings: Settings, error: BaseException) -> int:
    """Write the error as the part's last line, which `up` repeats (`headrace.up.process.last_words`). Returns the exit code."""
    code = exit_code(error)
    if logs.choose_format(settings["log.format"], sys.stderr) == "json":
        _log.error(f"{settings.command}.failed", error=str(error), kind=type(error).__name__, exit_code=code)
    else:
        sys.stderr.write(f"headrace {settings.command}: {error}\n")
    return code
