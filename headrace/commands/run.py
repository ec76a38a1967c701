"""Runs the parts of a deployment: sets up logging, builds the settings, runs, and turns an error into an exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import structlog

from headrace.base import logs
from headrace.base.errors import (
    EXIT_CONFIGURATION,
    EXIT_ENGINE_DIED,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    CommandError,
    HeadraceError,
    StartFailed,
)
from headrace.base.process import make_files_private
from headrace.broker.errors import CardKeyUnusable
from headrace.broker.part_state import PartState
from headrace.commands.preflight import check_conversion, check_exposure, check_up, check_worker
from headrace.config.build_settings import (
    batch_settings,
    bundled_model_dir,
    connect_options,
    frontend_settings,
    needs_bundled_model,
    router_options,
    scheduler_settings,
    subjects,
    worker_settings,
)
from headrace.config.secrets import take_secrets
from headrace.config.settings import Settings
from headrace.jetstream.errors import (
    AccessDenied,
    JetStreamDisabled,
    ServerTooOld,
    ServerUnreachable,
    SubjectError,
    TopologyError,
)
from headrace.up.process import end_with_supervisor
from headrace.workers.health.process_guard import TreeGuard

if TYPE_CHECKING:
    from headrace.up.output.terminal import Terminal

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
    from headrace.up.output.terminal import Terminal

    asked = settings["up.verbose"] or settings.given("log.format") or settings.given("log.level")
    if not asked and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from headrace.up.output.short_terminal import open_short_terminal

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
        from headrace.router.build import builder
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
    from headrace.commands.probe_server import serve_probes

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
    """Return the exit code for the error that ended a part."""
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
    from headrace.workers.models.bundled_model import NAME, is_ready, prepare

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
