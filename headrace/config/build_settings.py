"""From the one table of settings to the settings object of each package.

Every package knows only its own frozen settings and nothing of flags, variables or files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config.catalogue.prefill import PREFILL_DECISION
from headrace.config.settings import Settings
from headrace.errors import SettingsError
from headrace.jetstream.errors import SubjectError
from headrace.jetstream.subjects import REQUEST_CLASSES, Subjects, tenant_token

if TYPE_CHECKING:
    from headrace.frontend.settings import FrontendSettings
    from headrace.jetstream.context import ConnectOptions
    from headrace.jetstream.embedded_server import ServerSettings
    from headrace.router.placement.settings import SchedulerSettings
    from headrace.router.settings import RouterOptions
    from headrace.workers.settings import WorkerSettings

SIM_MODEL = "sim"

# How each engine calls the number of sequences it runs at once.
_SLOTS_ARGUMENT = {"vllm": "max_num_seqs", "sim": "slots"}
_WORKER_FIELDS = (
    "role",
    "tool_parser",
    "reasoning_parser",
    "drain_grace_s",
    "start_timeout_s",
    "stall_s",
    "first_token_s",
    "token_s",
    "canary_s",
    "canary_timeout_s",
    "metrics_port",
    "separate_frames",
    "labels",
    "aliases",
    "default_sampling",
    "default_max_tokens",
    "template_kwargs",
    "prefill",
    "prefill_min_tokens",
    "prefill_unready",
    "prefill_wait_s",
    "prefill_budget_tokens",
    "transfer_timeout_s",
)
_ROUTER_FIELDS = ("name", "models", "metrics_port", "drain_grace_s", "start_timeout_s", "index_entries", "record")
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
    from headrace.jetstream.context import ConnectOptions
    from headrace.jetstream.errors import ConnectError

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
    from headrace.jetstream.embedded_server import ServerSettings

    names = [field.name for field in dataclasses.fields(ServerSettings) if field.name != "extra"]
    return ServerSettings(**{name: settings[f"server.{name}"] for name in names})


def frontend_settings(settings: Settings) -> FrontendSettings:
    """Raises SettingsError for values that are wrong together."""
    from headrace.frontend.settings import FrontendSettings

    names = [field.name for field in dataclasses.fields(FrontendSettings) if field.name != "namespace"]
    try:
        return FrontendSettings(namespace=settings["namespace"], **{name: settings[f"frontend.{name}"] for name in names})
    except ValueError as error:
        raise SettingsError(f"frontend: {error}") from None


def worker_settings(settings: Settings) -> WorkerSettings:
    """For vllm without a model this names the bundled one, which must have been prepared (`bundled_model_dir`)."""
    from headrace.workers.settings import WorkerSettings

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


def router_options(settings: Settings) -> RouterOptions:
    """What one router process serves and holds."""
    from headrace.router.replica.settings import SnapshotSettings
    from headrace.router.settings import RouterOptions, SessionOptions

    return RouterOptions(
        namespace=settings["namespace"],
        session=SessionOptions(window=settings["router.window"], index_wait_s=settings["router.index_wait_s"]),
        snapshots=SnapshotSettings(
            every_events=settings["router.snapshot_events"],
            every_s=settings["router.snapshot_s"],
            keep=settings["router.snapshots"],
        ),
        **{name: settings[f"router.{name}"] for name in _ROUTER_FIELDS},
    )


def scheduler_settings(settings: Settings) -> SchedulerSettings:
    """How the router decides. Raises SettingsError for values that are wrong together or unknown."""
    from headrace.router.errors import SettingsInvalid
    from headrace.router.placement.settings import SchedulerSettings

    own = SchedulerSettings()
    tuning, window = settings["router.tuning"], settings["router.window"]
    known = {field.name for field in dataclasses.fields(SchedulerSettings)} - {"fairness", "limits", "calibration", "tiers"}
    if unknown := sorted(tuning.keys() - known):
        raise SettingsError(f"router.tuning: {unknown[0]!r} is none of {', '.join(sorted(known))}")
    try:
        return SchedulerSettings(
            **{
                "policy": settings["router.policy"],
                "temperature": settings["router.temperature"],
                "max_wait_s": settings["router.max_wait_s"],
                **{name: settings[f"router.{name}"] for name in PREFILL_DECISION},
                "tiers": {**own.tiers, **settings["router.tier_weights"]},
                "fairness": dataclasses.replace(
                    own.fairness,
                    weights={tenant_token(tenant): weight for tenant, weight in settings["router.tenant_weights"].items()},
                ),
                # How much is held is bounded where requests are pulled, a window for each class; the rest waits in its stream
                # and is not refused. What one tenant may hold of it is for the scheduler to say.
                "limits": dataclasses.replace(
                    own.limits,
                    window=len(REQUEST_CLASSES) * window,
                    tenant_requests=settings["router.tenant_requests"] or max(1, int(own.limits.tenant_share * window)),
                ),
                **tuning,
            }
        )
    except (SettingsInvalid, TypeError) as error:
        raise SettingsError(f"router: {error}") from None


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
    from headrace.workers import bundled_model

    return dict(bundled_model.ENGINE_ARGS)


def _bundled_name() -> str:
    from headrace.workers import bundled_model

    return bundled_model.NAME
