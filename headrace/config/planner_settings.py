"""Settings of the planner."""

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Literal

from headrace.base.setting import Setting, check_numbers

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
    """Return the settings of the pool that a fleet is."""
    time_s = fleet_times(settings.fleet_ttft).get(fleet)
    return settings if time_s is None else replace(settings, ttft_s=time_s)
