"""Describes the processes of one `headrace up`: command line, environment, and start order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.config.secrets import without_secrets_of_others
from headrace.config.settings import Settings
from headrace.up.console_part import ConsolePart, console_part
from headrace.up.frontend_probe import base_url
from headrace.up.managed_process import ManagedProcess
from headrace.up.metrics_ports import assign_ports
from headrace.up.restart_policy import RestartState
from headrace.up.server_logins import ServerLogins
from headrace.up.worker_plan import plan_worker, plan_workers
from headrace.up.worker_python import worker_python

FRONTEND_GRACE_S = 5.0
ROUTER_GRACE_S = 5.0
_MARGIN_S = 1.0  # a part ends its own grace period before it is killed


@dataclass(frozen=True, slots=True)
class Reaped:
    """A process of a part that has ended. It was started at Unix time `started` or later."""

    pid: int
    started: float


@dataclass(frozen=True, slots=True)
class Parts:
    """All processes except the NATS server."""

    frontends: tuple[ManagedProcess, ...] = ()
    workers: tuple[ManagedProcess, ...] = ()
    routers: tuple[ManagedProcess, ...] = ()
    console: ConsolePart | None = None

    def __iter__(self) -> Iterator[ManagedProcess]:
        yield from (*self.frontends, *self.workers, *self.routers)
        if self.console is not None:
            yield self.console.part

    def others_serve(self, part: ManagedProcess) -> bool:
        """Return True if a worker other than this part runs and answers requests."""
        return any(worker.serves and worker.child is not None for worker in self.workers if worker is not part)


def make_parts(settings: Settings, environment: Mapping[str, str], *, port: int, logins: ServerLogins | None = None) -> Parts:
    """Return the parts to run. `environment` is what all of them get, `port` the frontends', `logins` how each logs in.

    Raises SettingsError for numbers of workers that make no sense.
    """
    taken = {port}
    frontends = _frontends(settings, {**environment, **(logins.frontend() if logins is not None else {})}, port, taken)
    workers = _workers(settings, environment, logins, taken)
    login = logins.router() if logins is not None else {}
    routers = _routers(settings, {**environment, **login}, taken)
    url = base_url(settings["frontend.host"], port, tls=settings["frontend.tls_cert"] is not None)
    return Parts(frontends, workers, routers, console_part(settings, environment, frontend=url, taken=taken, logins=logins))


def _frontends(settings: Settings, environment: Mapping[str, str], port: int, taken: set[int]) -> tuple[ManagedProcess, ...]:
    """Return the frontends. One has the port for itself; of several each has one more, for its probes and metrics."""
    environment = {
        **without_secrets_of_others(environment, "frontend"),
        "HEADRACE_FRONTEND_DRAIN_GRACE_S": str(FRONTEND_GRACE_S - _MARGIN_S),
    }
    argv = ("frontend", "--port", str(port))
    if settings["up.frontends"] == 1:
        return (ManagedProcess("frontend", argv, environment, RestartState(essential=True)),)
    frontends: list[ManagedProcess] = []
    for number, own in enumerate(assign_ports(0, settings["up.frontends"], taken, host=settings["frontend.host"]), 1):
        env = {**environment, "HEADRACE_FRONTEND_SHARE_PORT": "true", "HEADRACE_FRONTEND_OWN_PORT": str(own)}
        frontends.append(ManagedProcess(f"frontend-{number}", argv, env, RestartState(essential=True), metrics_port=own))
    return tuple(frontends)


def _workers(
    settings: Settings, environment: Mapping[str, str], logins: ServerLogins | None, taken: set[int]
) -> tuple[ManagedProcess, ...]:
    environment = without_secrets_of_others(environment, "worker")
    cores = len(os.sched_getaffinity(0))
    if logins is None:
        plans = plan_workers(settings, environment, cores=cores)
    else:
        plans = plan_workers(settings, environment, cores=cores, login=logins.worker)
    ports = assign_ports(settings["worker.metrics_port"], len(plans), taken, host=settings["worker.metrics_host"])
    workers: list[ManagedProcess] = []
    for plan, port in zip(plans, ports, strict=True):
        after = workers[0] if plan.waits else None
        env = {**plan.env, "HEADRACE_WORKER_METRICS_PORT": str(port)}
        state = RestartState(essential=False)
        python = worker_python(plan.engine)
        workers.append(
            ManagedProcess(plan.name, plan.argv, env, state, role=plan.role, metrics_port=port, python=python, after=after)
        )
    return tuple(workers)


def make_worker(
    settings: Settings, environment: Mapping[str, str], *, model: str, role: str, parts: Parts, logins: ServerLogins | None
) -> ManagedProcess:
    """Return one more worker, to be run beside these parts.

    Raises SettingsError for a role or model of which no worker can be started here.
    """
    environment = without_secrets_of_others(environment, "worker")
    names = {part.name for part in parts}
    login = logins.worker if logins is not None else lambda _pool: {}
    plan = plan_worker(settings, environment, model=model, role=role, taken=names, login=login)
    taken = {part.metrics_port for part in parts if part.metrics_port}
    (port,) = assign_ports(0, 1, taken, host=settings["worker.metrics_host"])
    env = {**plan.env, "HEADRACE_WORKER_METRICS_PORT": str(port)}
    state, python = RestartState(essential=False), worker_python(plan.engine)
    return ManagedProcess(plan.name, plan.argv, env, state, role=plan.role, metrics_port=port, python=python)


def _routers(settings: Settings, environment: Mapping[str, str], taken: set[int]) -> tuple[ManagedProcess, ...]:
    environment = {
        **without_secrets_of_others(environment, "router"),
        "HEADRACE_ROUTER_DRAIN_GRACE_S": str(ROUTER_GRACE_S - _MARGIN_S),
    }
    ports = assign_ports(settings["router.metrics_port"], settings["up.routers"], taken, host=settings["router.metrics_host"])
    routers: list[ManagedProcess] = []
    for number, port in enumerate(ports, 1):
        name = f"router-{number}"
        env = {**environment, "HEADRACE_ROUTER_METRICS_PORT": str(port)}
        state = RestartState(essential=False)
        routers.append(ManagedProcess(name, ("router", "--name", name), env, state, metrics_port=port))
    return tuple(routers)
