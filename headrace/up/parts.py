"""Parts of one `headrace up`: command lines, environments, ports, start order, and the console."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from headrace.base.errors import SettingsError
from headrace.base.http_client import ask
from headrace.config.settings import Settings
from headrace.config.values import without_secrets_of_others
from headrace.frontend.auth.caller import is_loopback
from headrace.jetstream.errors import NOT_STORING
from headrace.up.restart_policy import ManagedProcess, RestartState
from headrace.up.server_logins import ServerLogins
from headrace.up.worker_plan import plan_worker, plan_workers, worker_python

# Finds a port for the frontend and queries it over HTTP.
#
# An HTTP client library would double the start-up time.

_QUIET_PORTS = range(20_000, 32_768)
_TRIES = 20

_MOST_BYTES = 1 << 20  # of an answer
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def reachable_host(host: str) -> str:
    """Return the address under which this machine reaches a server that listens on `host`."""
    return _ANY_HOST.get(host, host)


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the base URL for a client on this machine."""
    name = reachable_host(host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def choose_port(host: str, port: int, *, setting: str = "frontend") -> int:
    """Return `port`, or a free port for 0. Raises SettingsError when it is taken or the host is not this machine's.

    A free port is one that systems usually give to no outgoing connection, which could take it before the frontend does.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]

        def bound(number: int) -> int:
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address[0], number, *address[2:]))
                return int(probe.getsockname()[1])

        for free in random.sample(_QUIET_PORTS, _TRIES) if port == 0 else ():
            with contextlib.suppress(OSError):
                return bound(free)
        return bound(port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port} ({setting}.host, {setting}.port): {error.strerror}") from None


@cache
def _unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def get(host: str, port: int, path: str, *, tls: bool = False, timeout_s: float = 2.0) -> tuple[int, bytes]:
    """Return (status, body) of a GET; status 0 when there is no answer in time.

    With `tls` no certificate is checked: this asks the own frontend on the own machine, and sends nothing secret.
    """
    try:
        asking = ask("GET", base_url(host, port, tls=tls) + path, tls=_unchecked() if tls else None)
        async with asyncio.timeout(timeout_s), asking as answer:
            return answer.status, await answer.body(_MOST_BYTES)
    except (OSError, ValueError):
        return 0, b""


async def served_models(host: str, port: int, *, tls: bool = False) -> list[str]:
    """Return the names of the models that can answer, empty when the frontend does not say. No key is needed to ask."""
    status, body = await get(host, port, "/ready", tls=tls)
    try:
        return [str(name) for name in json.loads(body)["models"]] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        return []


async def stores_nothing(host: str, port: int, *, tls: bool = False) -> bool:
    """Return True if the frontend says that the NATS server takes no messages; False when it says nothing."""
    _, body = await get(host, port, "/health", tls=tls)
    try:
        return NOT_STORING in json.loads(body)["broker"].get("trouble", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


async def kinds_of(host: str, port: int, model: str, *, tls: bool = False) -> list[str]:
    """Return the kinds of requests that the model takes, empty when the frontend does not say."""
    status, body = await get(host, port, "/health", tls=tls)
    try:
        return [str(kind) for kind in json.loads(body)["models"][model]["kinds"]] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        return []


def assign_ports(first: int | None, count: int, taken: set[int], *, host: str = "127.0.0.1") -> list[int]:
    """Return a port for each of `count` parts, counting up from `first`; free ones outside `taken` for 0 or None.

    Ports are free on `host`. What is returned is added to `taken`. Raises SettingsError when no port is free.
    """
    ports: list[int] = []
    for number in range(count):
        port = first + number if first else 0
        while port == 0:
            found = choose_port(host, 0)
            port = 0 if found in taken else found
        taken.add(port)
        ports.append(port)
    return ports


CONSOLE_GRACE_S = 3.0
KEY_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolePart:
    """The console's process, its address, and the key without which it only shows."""

    part: ManagedProcess
    url: str
    key: str

    @property
    def link(self) -> str:
        """The link for the user of the deployment. Browsers send nothing of what stands behind the #."""
        return f"{self.url}#key={self.key}"

    def describe(self) -> dict[str, Any]:
        """Return the part as the run file shows it: without the key."""
        return {**self.part.describe(), "url": self.url}


def console_part(
    settings: Settings, environment: Mapping[str, str], *, frontend: str, taken: set[int], logins: ServerLogins | None
) -> ConsolePart | None:
    """Return the console of a deployment, None if it is to have none. `frontend` is the frontend's address.

    Raises SettingsError for a port that was asked for and is taken. Its port is added to `taken`.
    """
    if not settings["up.console"]:
        return None
    host: str = settings["console.host"]
    port = _port(settings, host, taken)
    key: str = settings["console.key"] or secrets.token_urlsafe(KEY_BYTES)
    context = logins.operator_context if logins is not None else None
    open_here = is_loopback(host) and is_loopback(settings["frontend.host"]) and not _asks_for_keys(settings)
    env = {
        **without_secrets_of_others(environment, "console"),
        **({"HEADRACE_NATS_CONTEXT": context} if context else {}),
        "HEADRACE_CONSOLE_KEY": key,
        "HEADRACE_CONSOLE_FRONTEND": frontend,
        "HEADRACE_CONSOLE_PRIVATE": str(not open_here or settings["console.private"]).lower(),
        "HEADRACE_CONSOLE_ALLOW_KILL": str(open_here or settings["console.allow_kill"]).lower(),
    }
    tls = settings["console.tls_cert"] is not None
    part = ManagedProcess("console", ("console", "--console-port", str(port)), env, RestartState(essential=False))
    return ConsolePart(part=part, url=f"{base_url(host, port, tls=tls)}/console", key=key)


def _port(settings: Settings, host: str, taken: set[int]) -> int:
    wanted: int = settings["console.port"]
    while True:
        try:
            port = choose_port(host, wanted, setting="console")
        except SettingsError:
            if settings.given("console.port"):
                raise
            port = 0
        if port and port not in taken:
            taken.add(port)
            return port
        wanted = 0


def _asks_for_keys(settings: Settings) -> bool:
    return bool(settings["api_key"]) or settings["frontend.auth"] == "keys" or settings["frontend.jwt_keys"] is not None


FRONTEND_GRACE_S = 6.0  # at the end of all, whatever its own grace is
FRONTEND_MARGIN_S = 2.0  # the last of it, for the errors of answers that are still running
ROUTER_GRACE_S = 5.0
PART_GROUP = "headrace.parts"
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
    installed: tuple[ManagedProcess, ...] = ()  # those of other packages

    def __iter__(self) -> Iterator[ManagedProcess]:
        yield from (*self.frontends, *self.workers, *self.routers, *self.installed)
        if self.console is not None:
            yield self.console.part

    def others_serve(self, part: ManagedProcess) -> bool:
        """Return True if a worker other than this part runs and answers requests."""
        return any(worker.serves and worker.child is not None for worker in self.workers if worker is not part)

    def is_last(self, part: ManagedProcess) -> bool:
        """Return True if no other frontend, worker or router runs, as this part is one."""
        for kind in (self.frontends, self.workers, self.routers):
            if part in kind:
                return all(other.child is None for other in kind if other is not part)
        return False


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
    console = console_part(settings, environment, frontend=url, taken=taken, logins=logins)
    parts = Parts(frontends, workers, routers, console)
    return replace(parts, installed=_installed(settings, environment, {part.name for part in parts}))


def _installed(settings: Settings, environment: Mapping[str, str], names: set[str]) -> tuple[ManagedProcess, ...]:
    """Return the parts of other packages: entry points that are functions of settings and environment.

    Each returns a ManagedProcess, whose `argv` is a command of `headrace`, or None. Raises SettingsError.
    """
    found: list[ManagedProcess] = []
    for point in sorted(entry_points(group=PART_GROUP), key=lambda point: point.name):
        try:
            part = point.load()(settings, without_secrets_of_others(environment, point.name))
        except Exception as error:
            raise SettingsError(f"part {point.name!r} ({point.value}) cannot be made: {error}") from error
        if part is None:
            continue
        if not isinstance(part, ManagedProcess) or part.name in names:
            raise SettingsError(f"part {point.name!r} ({point.value}) must be a ManagedProcess with a name of its own")
        names.add(part.name)
        found.append(part)
    return tuple(found)


def _frontends(settings: Settings, environment: Mapping[str, str], port: int, taken: set[int]) -> tuple[ManagedProcess, ...]:
    """Return the frontends. One has the port for itself; of several each has one more, for its probes and metrics."""
    environment = without_secrets_of_others(environment, "frontend")
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
