"""Checks what a start would find out only later, before anything is started, downloaded or imported at length."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.base.errors import SettingsError, StartFailed
from headrace.base.process import PRIVATE_FOLDER
from headrace.config.build_settings import bundled_model_dir, engine_arguments, frontend_settings, needs_bundled_model
from headrace.config.settings import Settings
from headrace.up.pools import every_pool
from headrace.up.server_logins import worker_login
from headrace.up.worker_plan import worker_counts
from headrace.up.worker_python import worker_python
from headrace.workers.errors import EngineStartFailed

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
    from headrace.frontend.auth.exposure import exposure_problem, is_loopback

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
        from headrace.workers.models.model_check import check_hub_model

        _named(settings, "worker.model", lambda: check_hub_model(model, settings["worker.engine_args"], os.environ))


def check_model_sources(settings: Settings) -> None:
    """Refuse a model, and what an engine's settings have it load, from where `worker.model_sources` does not allow.

    The simulator loads nothing, and the bundled model is checked by its digest. Raises SettingsError naming the wrong setting.
    """
    if settings["worker.engine"] == "sim":
        return
    from headrace.workers.model_source import check_loaded_sources, check_model_source

    model, rules = settings["worker.model"], settings["worker.model_sources"]
    if model:
        _named(settings, "worker.model", lambda: check_model_source(model, rules))
    _named(settings, "worker.engine_args", lambda: check_loaded_sources(settings["worker.engine_args"], rules))


def check_engine(settings: Settings) -> None:
    """Check all that this machine alone can tell of the engine's settings. Raises SettingsError naming the wrong one.

    An engine of the operator's own is not checked: it says itself what is wrong when it starts.
    """
    match settings["worker.engine"]:
        case "sim":
            _check_simulator(settings)
        case "vllm":
            _check_vllm(settings)
        case "sglang":
            _check_sglang(settings)
        case "trtllm":
            _check_trtllm(settings)


def _check_simulator(settings: Settings) -> None:
    from headrace.workers.sim.settings import parse_settings

    _named(settings, "worker.engine_args", lambda: parse_settings(engine_arguments(settings)))


def _check_vllm(settings: Settings) -> None:
    from headrace.workers.vllm.argument_check import check_arguments
    from headrace.workers.vllm.installed_check import check_compiler, check_packages

    _named(settings, "worker.engine", lambda: check_packages("torch", "vllm"))
    _check_model_path(settings)
    _named(settings, "worker.engine_args", lambda: check_arguments(settings["worker.engine_args"]))
    _named(settings, "worker.engine_args", lambda: check_compiler(engine_arguments(settings), os.environ))
    if needs_bundled_model(settings):
        check_conversion(settings)


def _check_sglang(settings: Settings) -> None:
    from headrace.workers.sglang.argument_check import check_arguments
    from headrace.workers.sglang.installed_check import check_packages

    _named(settings, "worker.engine", check_packages)
    _check_model_path(settings)
    _named(settings, "worker.engine_args", lambda: check_arguments(settings["worker.engine_args"]))
    if needs_bundled_model(settings):
        check_conversion(settings)


def _check_trtllm(settings: Settings) -> None:
    from headrace.workers.trtllm.argument_check import check_arguments
    from headrace.workers.trtllm.installed_check import check_package

    _named(settings, "worker.engine", check_package)
    _check_model_path(settings)
    _named(settings, "worker.engine_args", lambda: check_arguments(settings["worker.engine_args"]))


def _check_model_path(settings: Settings) -> None:
    from headrace.workers.models.model_check import check_model_path

    model = settings["worker.model"]
    if model is not None:
        _named(settings, "worker.model", lambda: check_model_path(model))


def check_conversion(settings: Settings) -> None:
    """Check that the bundled model is there, or that what converts it is installed. Raises SettingsError."""
    from headrace.workers.models.bundled_model import is_ready
    from headrace.workers.vllm.installed_check import check_packages

    if not is_ready(bundled_model_dir(settings)):
        _named(settings, "worker.engine", lambda: check_packages("torch", "transformers", "gguf", "accelerate"))


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
