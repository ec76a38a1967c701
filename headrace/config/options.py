"""Collects every setting of Headrace from the declarations of the packages, as data.

One `Setting` on a field of a settings dataclass gives an option its flag, its environment variable, its TOML key, its type
and range, its default and its help text, so that these cannot drift apart.  `headrace.config.settings` reads values by these
options, `headrace.config.build_settings` makes flags of them and fills the dataclasses, `headrace config` prints them and
`docs/settings.md` is made from them.

A section is imported when it is first asked for, because a dataclass costs a millisecond to define and each command needs
only some of them. No module that declares settings is heavy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin

from headrace.base.setting import Declared, Setting, check_numbers, declared
from headrace.config.command_line import (
    Console,
    Deployment,
    EngineSlots,
    Logging,
    NatsServers,
    SchedulerTuning,
    Up,
    WorkerPool,
)

FORECASTERS = ("arima", "ces", "ets", "theta")  # of statsforecast


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Targets, bounds and times of the planner. A cheap module: every command reads its declarations."""

    mode: Annotated[
        Literal["advise", "act"],
        Setting("Advise only, or act.", "--mode"),
    ] = "advise"
    ttft_s: Annotated[float, Setting("Target of the time to first token.", "--ttft", least=0.001)] = 2.0
    fleet_ttft: Annotated[
        str,
        Setting("Targets of single worker groups: GROUP=SECONDS, separated by commas.", "--planner-fleet-ttft"),
    ] = ""
    itl_s: Annotated[float, Setting("Target of the time between two tokens.", "--itl", least=0.001)] = 0.05
    miss: Annotated[float, Setting("Share of requests that may miss the targets.", least=0.0001, most=0.5)] = 0.01
    least: Annotated[
        int,
        Setting("Fewest workers per role of a pool. 0: none while nothing arrives.", "--least", least=0),
    ] = 1
    most: Annotated[int, Setting("Most workers of a pool over all roles.", "--most", least=1)] = 8
    budget: Annotated[
        float,
        Setting("Most cost of all workers per hour, by `worker.price`; 0: no limit.", "--budget", least=0),
    ] = 0.0
    priority: Annotated[str, Setting("Pools or models that get workers first when the budget binds, separated by commas.")] = ""
    tick_s: Annotated[float, Setting("Time between two decisions.", "--tick", least=0.1)] = 5.0
    step_s: Annotated[float, Setting("Length of the steps in which arrivals are forecast.", least=0.5)] = 5.0
    season_s: Annotated[float, Setting("Period of the demand: a day.", least=10)] = 86400.0
    start_s: Annotated[float, Setting("Start-up time of a worker until one was measured.", least=0.1)] = 60.0
    down_s: Annotated[float, Setting("Time for which fewer workers must have been enough before one leaves.", least=1)] = 30.0
    idle_s: Annotated[
        float, Setting("Time without a request after which a pool goes to no worker, if `least` is 0.", least=1)
    ] = 600.0
    fresh_s: Annotated[float, Setting("Age above which a load report is ignored.", least=0.5)] = 5.0
    confidence: Annotated[
        float,
        Setting("Initial quantile of the forecast to plan for: higher ones cost workers.", least=0.5, most=0.999),
    ] = 0.85
    adapt: Annotated[bool, Setting("Move that quantile by the missed targets, between 0.5 and 0.98.", "--adapt")] = True
    forecasters: Annotated[
        str,
        Setting(
            "Further forecasters of statsforecast, separated by commas: arima, ces, ets, theta.",
            "--forecasters",
        ),
    ] = ""

    start_command: Annotated[
        str | None, Setting("Command that starts one worker. Default: by the running `up`.", "--start-command")
    ] = None
    kubernetes: Annotated[
        bool,
        Setting("Scale the marked Deployments and LeaderWorkerSets of this pod's namespace.", "--kubernetes"),
    ] = False
    profile: Annotated[
        str | None,
        Setting("JSON file with measured speeds by role, for the first plans.", "--profile", kind="path"),
    ] = None
    host: Annotated[str, Setting("Address of the page of desired workers, probes and metrics.", "--planner-host")] = "127.0.0.1"
    port: Annotated[int, Setting("Port of that page; 0 picks a free one.", "--planner-port", least=0, most=65535)] = 9102

    def __post_init__(self) -> None:
        check_numbers(self)
        forecaster_names(self.forecasters)
        fleet_times(self.fleet_ttft)
        if self.least > self.most:
            raise ValueError(f"planner.least = {self.least} is more than planner.most = {self.most}")
        if self.kubernetes and self.start_command:
            raise ValueError("planner.kubernetes and planner.start_command exclude each other")


def forecaster_names(chosen: str) -> tuple[str, ...]:
    """Return the models of statsforecast that a setting names, each once. Raises ValueError for one that there is not."""
    names = tuple(dict.fromkeys(name.strip() for name in chosen.split(",") if name.strip()))
    unknown = [name for name in names if name not in FORECASTERS]
    if unknown:
        raise ValueError(f"planner.forecasters: {', '.join(unknown)} is none of {', '.join(FORECASTERS)}")
    return names


def fleet_times(chosen: str) -> dict[str, float]:
    """Return the times to the first token that a setting names by fleet. Raises ValueError for what is none."""
    times: dict[str, float] = {}
    for part in (part.strip() for part in chosen.split(",")):
        fleet, equals, seconds = part.rpartition("=")
        try:
            time_s = float(seconds)
        except ValueError:
            time_s = 0.0
        if part and not (fleet and equals and 0.0 < time_s < inf and fleet not in times):
            raise ValueError(f"planner.fleet_ttft: {part!r} is no FLEET=SECONDS, or names a fleet again")
        if part:
            times[fleet] = time_s
    return times


def for_fleet(settings: PlannerSettings, fleet: str) -> PlannerSettings:
    time_s = fleet_times(settings.fleet_ttft).get(fleet)
    return settings if time_s is None else replace(settings, ttft_s=time_s)


Kind = Literal["text", "integer", "seconds", "number", "switch", "choice", "list", "path", "table"]
Command = Literal["up", "frontend", "worker", "router", "streams", "control", "model", "console", "planner"]

_ALL: tuple[Command, ...] = ("up", "frontend", "worker", "router", "streams", "control", "console", "planner")


class Section(NamedTuple):
    """Settings with the same first part of their keys. `title` heads their flags.

    `owners` imports and returns the classes that declare them. `commands` use those settings that name no others; `also` are
    further commands of settings that do.
    """

    title: str
    commands: tuple[Command, ...]
    owners: Callable[[], tuple[type, ...]]
    also: tuple[Command, ...] = ()


def _nats() -> tuple[type, ...]:
    from headrace.jetstream.context import ConnectOptions

    return NatsServers, ConnectOptions


def _server() -> tuple[type, ...]:
    from headrace.jetstream.settings import ServerSettings

    return (ServerSettings,)


def _frontend() -> tuple[type, ...]:
    from headrace.frontend.settings import FrontendSettings

    return (FrontendSettings,)


def _batch() -> tuple[type, ...]:
    from headrace.broker.batches.settings import BatchSettings

    return (BatchSettings,)


def _worker() -> tuple[type, ...]:
    from headrace.workers.settings import WorkerSettings

    return WorkerSettings, EngineSlots, WorkerPool


def _router() -> tuple[type, ...]:
    from headrace.router.placement.settings import AdmissionSettings, FairnessSettings, SchedulerSettings
    from headrace.router.settings import RouterOptions, SessionOptions, SnapshotSettings

    deciding = (SchedulerSettings, FairnessSettings, AdmissionSettings, SchedulerTuning)
    return (RouterOptions, SessionOptions, *deciding, SnapshotSettings)


def _planner() -> tuple[type, ...]:

    return (PlannerSettings,)


# In the order of documents. Settings of the first section have no prefix.
SECTIONS: dict[str, Section] = {
    "": Section("", _ALL, lambda: (Deployment,), also=("model",)),
    "log": Section("logging", (*_ALL, "model"), lambda: (Logging,)),
    "nats": Section("NATS connection", _ALL, _nats),
    "server": Section("embedded NATS server", ("up",), _server),
    "up": Section("supervision", ("up",), lambda: (Up,)),
    "console": Section("console", ("up", "console"), lambda: (Console,)),
    "frontend": Section("HTTP frontend", ("up", "frontend"), _frontend),
    "batch": Section("batches", ("up", "frontend"), _batch),
    "worker": Section("worker and engine", ("up", "worker"), _worker),
    "router": Section("router", ("up", "router"), _router),
    "planner": Section("planner", ("planner",), _planner),
}

# Variables that are no settings but belong to Headrace.
OTHER_ENV = {
    "HEADRACE_CONFIG": "the TOML file to read",
    "HEADRACE_SUPERVISOR_PID": "set by `headrace up` for its parts: they end when that process does",
}


class Option(NamedTuple):
    """A setting as an operator sees it. `key` is the TOML key; the environment variable follows from it.

    `owner` and `field` are the class and its field that hold the value. The default of a table is empty: what is given is
    put over the owner's default key by key.
    """

    key: str
    kind: Kind
    default: Any
    choices: tuple[str, ...]
    commands: tuple[Command, ...]
    owner: type
    field: str
    setting: Setting

    @property
    def flag(self) -> str:
        return self.setting.flag

    @property
    def env(self) -> str:
        return "HEADRACE_" + self.key.replace(".", "_").upper()

    @property
    def dest(self) -> str:
        return self.key.replace(".", "__")


@cache
def section_options(section: str) -> tuple[Option, ...]:
    """Return the settings of a section in the order of help texts and documents."""
    return tuple(_collect(section))


def all_options() -> list[Option]:
    """Return the settings of all sections. This imports the settings modules of all packages."""
    return [option for section in SECTIONS for option in section_options(section)]


def options_of(command: Command) -> list[Option]:
    """Return the settings that a command uses. No other section is imported."""
    used = [name for name, section in SECTIONS.items() if command in section.commands or command in section.also]
    return [option for section in used for option in section_options(section) if command in option.commands]


def declared_by(owner: type, section: str) -> list[Option]:
    return [option for option in section_options(section) if option.owner is owner]


def find(key: str) -> Option | None:
    """Return the setting with this TOML key, or None. Only its section is imported."""
    section, dot, _ = key.partition(".")
    section = section if dot else ""
    return next((o for o in section_options(section) if o.key == key), None) if section in SECTIONS else None


def find_variable(name: str) -> Option | None:
    """Return the setting with this environment variable, or None. Only its section is imported."""
    for section in SECTIONS:
        if name.startswith(f"HEADRACE_{section.upper()}"):
            for option in section_options(section):
                if option.env == name:
                    return option
    return None


def _collect(section: str) -> Iterator[Option]:
    """Yield the options of a section. Raises ValueError for an `after` that names no option of the section."""
    rows: list[list[Option]] = []
    moved: dict[str, list[Option]] = {}
    for owner in SECTIONS[section].owners():
        row: list[Option] = []
        rows.append(row)
        for field in declared(owner):
            if field.setting.after:
                row = moved[field.setting.after] = []
            row.append(_option(section, owner, field))
    for row in rows:
        yield from _with_moved(row, moved)
    if moved:
        raise ValueError(f"settings of {section!r} are declared after {', '.join(moved)}, which is none of them")


def _with_moved(row: list[Option], moved: dict[str, list[Option]]) -> Iterator[Option]:
    for option in row:
        yield option
        yield from _with_moved(moved.pop(option.key, []), moved)


def _option(section: str, owner: type, declaration: Declared) -> Option:
    field, annotation, default, setting = declaration
    key = f"{section}.{setting.key or field}" if section else field
    kind, choices = _kind(annotation, setting, seconds=field.endswith("_s"))
    used_by = cast("tuple[Command, ...]", setting.commands) or SECTIONS[section].commands
    return Option(key, kind, {} if kind == "table" else default, choices, used_by, owner, field, setting)


def _kind(annotation: Any, setting: Setting, *, seconds: bool) -> tuple[Kind, tuple[str, ...]]:
    if setting.kind:
        return cast("Kind", setting.kind), ()
    inner = get_args(annotation)
    if NoneType in inner:
        (annotation,) = (one for one in inner if one is not NoneType)
    if setting.other:
        (annotation,) = (one for one in get_args(annotation) if one is not str)
    origin = get_origin(annotation)
    if origin is Literal:
        return "choice", get_args(annotation)
    if origin in (Sequence, tuple):
        return "list", ()
    if origin is Mapping:
        return "table", ()
    return ("seconds" if annotation is float and seconds else _PLAIN[annotation]), ()


_PLAIN: dict[type, Kind] = {str: "text", int: "integer", float: "number", bool: "switch"}
