"""Builds the settings object of each package from the settings of a command.

Each package knows only its own frozen settings and nothing of flags, variables or files.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.errors import SettingsError
from headrace.config.options import SECTIONS, Command, Option, declared_by, options_of
from headrace.config.settings import Settings, load
from headrace.config.values import hide_arguments
from headrace.jetstream.errors import ConnectError, SubjectError
from headrace.jetstream.subjects import REQUEST_CLASSES, Subjects, tenant_token

if TYPE_CHECKING:
    from headrace.broker.batches.settings import BatchSettings
    from headrace.config.options import PlannerSettings
    from headrace.frontend.settings import FrontendSettings
    from headrace.jetstream.context import ConnectOptions
    from headrace.jetstream.settings import ServerSettings
    from headrace.router.placement.settings import AdmissionSettings, FairnessSettings, SchedulerSettings
    from headrace.router.settings import RouterOptions
    from headrace.workers.settings import WorkerSettings


def read_settings(parsed: argparse.Namespace, command: Command) -> Settings:
    """Return the settings of a parsed command line. Raises SettingsError."""
    given = vars(parsed)
    options = options_of(command)
    hide_arguments(options)
    flags = {option.key: given.get(option.dest) for option in options}
    return load(command, flags=flags, environ=os.environ, config=given.get("config"))


def add_setting_flags(parser: argparse.ArgumentParser, command: Command) -> list[argparse.Action]:
    """Add --config and a flag for each setting of `command` that has one, grouped by section. Returns what was added."""
    config = parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML file with settings (default: headrace.toml if it is there)",
    )
    added = [config]
    groups: dict[str, Any] = {}
    for option in options_of(command):
        if not option.flag:
            continue
        section = option.key.rpartition(".")[0]
        if section and section not in groups:
            groups[section] = parser.add_argument_group(SECTIONS[section].title)
        flags = [*filter(None, [option.setting.short]), option.flag]
        added.append(groups.get(section, parser).add_argument(*flags, **_flag_options(option)))
    return added


def _flag_options(option: Option) -> dict[str, Any]:
    shown = (
        f"{option.setting.help} [{_default_text(option)}; {option.env}]"
        if _default_text(option)
        else f"{option.setting.help} [{option.env}]"
    )
    # An absent flag leaves no attribute: defaults are the settings' business, and a nested command must not undo its parent's.
    options: dict[str, Any] = {"dest": option.dest, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
    if option.kind == "switch":
        return {**options, "action": argparse.BooleanOptionalAction}
    if option.kind == "table":
        return {**options, "action": "append", "metavar": option.setting.metavar}
    metavar = option.setting.metavar or {
        "choice": "|".join([*option.choices, *filter(None, [option.setting.other])]),
        "seconds": "SECONDS",
        "integer": "N",
        "path": "PATH",
    }.get(option.kind, "TEXT")
    return {**options, "metavar": metavar}


def _default_text(option: Option) -> str:
    if option.default in (None, (), {}):
        return ""
    if option.kind == "switch":
        return f"default: {'on' if option.default else 'off'}"
    return f"default: {option.default:g}" if option.kind == "seconds" else f"default: {option.default}"


SIM_MODEL = "sim"
MODEL_ENGINES = frozenset({"vllm", "sglang"})
"""Engines that load the weights of a model, and that have the bundled one where none is given."""

# The name that each engine has for the number of sequences it runs at once.
_SLOTS_ARGUMENT = {
    "vllm": "max_num_seqs",
    "sglang": "max_running_requests",
    "sim": "slots",
    "trtllm": "max_batch_size",
}


def values_of(settings: Settings, section: str, owner: type, *, only_given: bool = False) -> dict[str, Any]:
    """Return field → value of the settings that a class declares. `only_given` leaves out those at their default."""
    options = declared_by(owner, section)
    return {option.field: settings[option.key] for option in options if not only_given or settings.given(option.key)}


def subjects(settings: Settings) -> Subjects:
    """Return the subjects of the deployment. Raises SettingsError for a prefix that cannot be part of a subject."""
    try:
        return Subjects(settings["prefix"])
    except SubjectError as error:
        raise SettingsError(f"prefix = {settings['prefix']!r} ({settings.source('prefix')}): {error}") from None


def connect_options(settings: Settings, *, name: str) -> ConnectOptions:
    """Return how to reach NATS: the context if one is named, with all given settings on top. `name` shows in server reports.

    Raises SettingsError for a context that cannot be used and for values that are wrong together.
    """
    from headrace.jetstream.context import ConnectOptions

    given = values_of(settings, "nats", ConnectOptions, only_given=True)
    if settings["nats.url"]:
        given["servers"] = settings["nats.url"]
    try:
        context = settings["nats.context"]
        base = ConnectOptions.from_context(context) if context else ConnectOptions()
        return dataclasses.replace(base, **given, name=name)
    except ConnectError as error:
        raise SettingsError(f"nats: {error}") from None


def server_settings(settings: Settings) -> ServerSettings:
    from headrace.jetstream.settings import ServerSettings

    return ServerSettings(**values_of(settings, "server", ServerSettings))


def frontend_settings(settings: Settings) -> FrontendSettings:
    """Return the settings of a frontend. Raises SettingsError for values that are wrong together."""
    from headrace.frontend.settings import FrontendSettings

    try:
        return FrontendSettings(
            namespace=settings["namespace"],
            api_key=settings["api_key"],
            **values_of(settings, "frontend", FrontendSettings),
        )
    except ValueError as error:
        raise SettingsError(f"frontend: {error}") from None


def batch_settings(settings: Settings) -> BatchSettings:
    """Return the settings of batches. Raises SettingsError for a value that is wrong."""
    from headrace.broker.batches.settings import BatchSettings

    try:
        return BatchSettings(**values_of(settings, "batch", BatchSettings))
    except ValueError as error:
        raise SettingsError(f"batch: {error}") from None


def worker_settings(settings: Settings) -> WorkerSettings:
    """Return the settings of a worker. Raises SettingsError for values that are wrong together.

    Without a model the simulator has a name of its own, vLLM and SGLang get the bundled model, which must have been prepared
    (`bundled_model_dir`), and an engine of the user's own names its model itself.
    """
    from headrace.workers.settings import WorkerSettings

    values = values_of(settings, "worker", WorkerSettings)
    if values["model"] is None:
        model, name = _default_model(settings)
        values["model"], values["served_name"] = model, values["served_name"] or name
    values["engine_args"] = engine_arguments(settings)
    try:
        return WorkerSettings(namespace=settings["namespace"], **values)
    except ValueError as error:
        raise SettingsError(f"worker: {error}") from None


def _default_model(settings: Settings) -> tuple[str, str | None]:
    """Return the model of a worker that was given none, and its name. None leaves the name to the engine."""
    if needs_bundled_model(settings):
        return str(bundled_model_dir(settings)), _bundled_name()
    return (SIM_MODEL, SIM_MODEL) if settings["worker.engine"] == "sim" else ("", None)


def planner_settings(settings: Settings) -> PlannerSettings:
    """Return the settings of the planner. Raises SettingsError for values that are wrong together."""
    from headrace.config.options import PlannerSettings

    try:
        return PlannerSettings(**values_of(settings, "planner", PlannerSettings))
    except ValueError as error:
        raise SettingsError(f"planner: {error}") from None


def router_options(settings: Settings) -> RouterOptions:
    from headrace.router.settings import RouterOptions, SessionOptions, SnapshotSettings

    return RouterOptions(
        namespace=settings["namespace"],
        session=SessionOptions(**values_of(settings, "router", SessionOptions)),
        snapshots=SnapshotSettings(**values_of(settings, "router", SnapshotSettings)),
        **values_of(settings, "router", RouterOptions),
    )


def scheduler_settings(settings: Settings) -> SchedulerSettings:
    """Return the settings of the router's decisions. Raises SettingsError for values that are wrong together or unknown."""
    from headrace.router.errors import SettingsInvalid
    from headrace.router.placement.settings import AdmissionSettings, FairnessSettings, SchedulerSettings

    own = SchedulerSettings()
    known = {field.name for field in dataclasses.fields(own)} - {"fairness", "limits", "calibration", "tiers"}
    tuning = settings["router.tuning"]
    if unknown := sorted(tuning.keys() - known):
        raise SettingsError(f"router.tuning: {unknown[0]!r} is none of {', '.join(sorted(known))}")
    values = values_of(settings, "router", SchedulerSettings)
    values["tiers"] = {**own.tiers, **values["tiers"]}
    try:
        values["fairness"] = _fairness(values_of(settings, "router", FairnessSettings), own.fairness)
        values["limits"] = _limits(
            values_of(settings, "router", AdmissionSettings), own.limits, window=settings["router.window"]
        )
        return SchedulerSettings(**{**values, **tuning})
    except (SettingsInvalid, TypeError) as error:
        raise SettingsError(f"router: {error}") from None


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """Return the engine's own settings, with `worker.slots` under the engine's name for it."""
    arguments = {**(_bundled_arguments() if needs_bundled_model(settings) else {}), **settings["worker.engine_args"]}
    if settings["worker.slots"] is not None:
        arguments.setdefault(_SLOTS_ARGUMENT.get(settings["worker.engine"], "slots"), settings["worker.slots"])
    return arguments


def needs_bundled_model(settings: Settings) -> bool:
    """Return whether a worker with these settings runs the bundled model."""
    return settings["worker.engine"] in MODEL_ENGINES and settings["worker.model"] is None


def bundled_model_dir(settings: Settings) -> Path:
    """Return the folder of the bundled model, which exists once the model is prepared."""
    return Path(settings["data_dir"]).resolve() / "models" / _bundled_name()


def _fairness(values: Mapping[str, Any], own: FairnessSettings) -> FairnessSettings:
    weights = {tenant_token(tenant): weight for tenant, weight in values["weights"].items()}
    return dataclasses.replace(own, **{**values, "weights": weights})


def _limits(values: Mapping[str, Any], own: AdmissionSettings, *, window: int) -> AdmissionSettings:
    """Return limits under which the scheduler refuses a request only for the share of its tenant.

    The number of requests held is already bounded where they are pulled, by a window for each class; the rest waits in its
    stream and is not refused.
    """
    return dataclasses.replace(
        own,
        window=len(REQUEST_CLASSES) * window,
        tenant_requests=values["tenant_requests"] or max(1, int(own.tenant_share * window)),
    )


def _bundled_arguments() -> dict[str, Any]:
    from headrace.workers import bundled_model

    return dict(bundled_model.ENGINE_ARGS)


def _bundled_name() -> str:
    from headrace.workers import bundled_model

    return bundled_model.NAME
