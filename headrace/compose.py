"""From the one table of settings to the settings object of each package.

Every package knows only its own frozen settings and nothing of flags, variables or files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import SettingsError
from headrace.settings import Settings
from jetstream.errors import SubjectError
from jetstream.subjects import Subjects

if TYPE_CHECKING:
    from frontend.settings import FrontendSettings
    from jetstream.context import ConnectOptions
    from jetstream.server import ServerSettings
    from workers.settings import WorkerSettings

SIM_MODEL = "sim"

# How each engine calls the number of sequences it runs at once.
_SLOTS_ARGUMENT = {"vllm": "max_num_seqs", "sim": "slots"}
_WORKER_FIELDS = ("role", "drain_grace_s", "start_timeout_s", "stall_s", "metrics_port", "separate_frames")
_NATS_FIELDS = (
    "user",
    "password",
    "token",
    "credentials",
    "nkey_seed",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_first",
    "inbox_prefix",
    "connect_timeout_s",
)


def subjects(settings: Settings) -> Subjects:
    """Raises SettingsError for a prefix that cannot be part of a subject."""
    try:
        return Subjects(settings["prefix"])
    except SubjectError as error:
        raise SettingsError(f"prefix = {settings['prefix']!r} ({settings.source('prefix')}): {error}") from None


def connect_options(settings: Settings, *, name: str) -> ConnectOptions:
    """How to reach NATS: the context if one is named, with everything that was given on top. `name` shows in server reports."""
    from jetstream.context import ConnectOptions
    from jetstream.errors import ConnectError

    given: dict[str, Any] = {field: settings[f"nats.{field}"] for field in _NATS_FIELDS if settings.given(f"nats.{field}")}
    if settings["nats.url"]:
        given["servers"] = settings["nats.url"]
    try:
        context = settings["nats.context"]
        base = ConnectOptions.from_context(context) if context else ConnectOptions()
        return dataclasses.replace(base, **given, name=name)
    except ConnectError as error:
        raise SettingsError(f"nats: {error}") from None


def server_settings(settings: Settings) -> ServerSettings:
    """Of the embedded NATS server."""
    from jetstream.server import ServerSettings

    names = [field.name for field in dataclasses.fields(ServerSettings) if field.name != "extra"]
    return ServerSettings(**{name: settings[f"server.{name}"] for name in names})


def frontend_settings(settings: Settings) -> FrontendSettings:
    """Raises SettingsError for values that are wrong together."""
    from frontend.settings import FrontendSettings

    names = [field.name for field in dataclasses.fields(FrontendSettings) if field.name != "namespace"]
    try:
        return FrontendSettings(namespace=settings["namespace"], **{name: settings[f"frontend.{name}"] for name in names})
    except ValueError as error:
        raise SettingsError(f"frontend: {error}") from None


def worker_settings(settings: Settings) -> WorkerSettings:
    """For vllm without a model this names the bundled one, which must have been prepared (`bundled_model_dir`)."""
    from workers.settings import WorkerSettings

    engine = settings["worker.engine"]
    model, served_name = settings["worker.model"], settings["worker.served_name"]
    if model is None:
        model, default_name = (
            (str(bundled_model_dir(settings)), _bundled_name()) if engine == "vllm" else (SIM_MODEL, SIM_MODEL)
        )
        served_name = served_name or default_name
    try:
        return WorkerSettings(
            engine=engine,
            model=model,
            served_name=served_name,
            namespace=settings["namespace"],
            worker_name=settings["worker.name"],
            engine_args=engine_arguments(settings),
            **{name: settings[f"worker.{name}"] for name in _WORKER_FIELDS},
        )
    except ValueError as error:
        raise SettingsError(f"worker: {error}") from None


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """The engine's own settings, `worker.slots` among them under the engine's name for it."""
    arguments = {**(_bundled_arguments() if needs_bundled_model(settings) else {}), **settings["worker.engine_args"]}
    if settings["worker.slots"] is not None:
        arguments.setdefault(_SLOTS_ARGUMENT[settings["worker.engine"]], settings["worker.slots"])
    return arguments


def needs_bundled_model(settings: Settings) -> bool:
    """Whether a worker with these settings runs the bundled model."""
    return settings["worker.engine"] == "vllm" and settings["worker.model"] is None


def bundled_model_dir(settings: Settings) -> Path:
    """Where the bundled model lies once it is prepared."""
    return Path(settings["data_dir"]).resolve() / "models" / _bundled_name()


def _bundled_arguments() -> dict[str, Any]:
    from workers import bundled

    return dict(bundled.ENGINE_ARGS)


def _bundled_name() -> str:
    from workers import bundled

    return bundled.NAME
