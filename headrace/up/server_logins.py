"""Gives the parts of `headrace up` their logins at the embedded NATS server: the one of the deployment, or those of roles.

The seeds lie in `<data-dir>/nats/logins`, in a folder that only the user of the deployment can open.  A part gets the path of
the context that names its seed, by an environment variable; nothing of it is in `ps`.  Where logins are of roles, commands have
the operator's, and a worker gets one for each start (`headrace.up.server_logins`); the login of all workers of its pool is for
those that are started by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import structlog

from headrace.base.errors import SettingsError, StartFailed
from headrace.config.build_settings import subjects, worker_settings
from headrace.config.settings import Settings
from headrace.config.values import POOLS
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import ConnectError, JetStreamError
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.subjects import Subjects, pool_id, tenant_token
from headrace.up.runfile import LOGINS, ONE_LOGIN


def every_pool(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield the name and the settings of each pool that `headrace up` runs. The name of the first one is empty.

    Raises SettingsError for a pool that makes no sense, and for two of one name.
    """
    yield "", settings
    for name in settings[POOLS]:
        pool = settings.of_pool(name)
        if pool["worker.served_name"] == settings["worker.served_name"]:
            _check_fleets(name, settings, pool)
        yield name, pool


def _check_fleets(name: str, first: Settings, other: Settings) -> None:
    """Raise SettingsError for a pool of the first one's model that is no fleet beside it."""
    where = f"{POOLS}.{name} ({first.source(POOLS)})"
    if not other["worker.fleet"]:
        raise SettingsError(f"{where}: the first pool has that name; a pool is one engine, unless both are fleets (fleet)")
    if first["worker.fleet"] in ("", other["worker.fleet"]):
        raise SettingsError(f"{where}: the first pool serves that model, too: give it a fleet of its own (--fleet)")


VARIABLE = "HEADRACE_NATS_CONTEXT"
WORKER = "worker"
OPERATOR = Login("operator")
FOR_PEOPLE = (Login("console"), Login("planner"), Login("worker"))  # of no part of `up`


class ServerLogins:
    """The logins of one deployment, as far as its server asks for them."""

    def __init__(self, settings: Settings, folder: Path, *, kind: Literal["none", "one", "roles"]) -> None:
        """`folder` is that of the embedded server, `kind` which logins it asks for."""
        self._kind = kind
        self._settings = settings
        self._folder = folder / LOGINS.name
        self._starts: set[Login] = set()

    @property
    def by_role(self) -> bool:
        return self._kind == "roles"

    @property
    def subjects(self) -> Subjects:
        return subjects(self._settings)

    def server_config(self) -> str:
        """Make the seeds that are missing and return what the server's configuration needs to know. Raises StartFailed."""
        if self._kind == "none":
            return ""
        from headrace.jetstream.logins.nkey_logins import accounts_config, make_keys, one_user_config
        from headrace.jetstream.topology import Topology

        if self.by_role and not self._starts:
            self._remove_files(f"{WORKER}*.*")  # of a supervisor that was killed
        try:
            if not self.by_role:
                return one_user_config(self._folder, ONE_LOGIN)
            keys = make_keys(self._folder, {*self._logins(), *self._starts})
            return accounts_config(Topology(subjects(self._settings)), keys)
        except ConnectError as error:
            raise StartFailed(str(error)) from None

    def write_contexts(self, url: str) -> None:
        """Write the context of each login for a server that listens at `url`. Raises StartFailed."""
        if self._kind == "one":
            self._write_one(url)
        for login in self._logins() if self.by_role else ():
            self.write_context(login, url)

    def _write_one(self, url: str) -> None:
        from headrace.jetstream.logins.nkey_logins import write_one_context

        try:
            write_one_context(self._folder, ONE_LOGIN, url=url, tls=tls_files(self._settings))
        except ConnectError as error:
            raise StartFailed(str(error)) from None

    def write_context(self, login: Login, url: str) -> None:
        """Write the context of one login. Raises StartFailed."""
        from headrace.jetstream.logins.nkey_logins import write_context

        try:
            write_context(self._folder, login, url=url, prefix=self._settings["prefix"], tls=tls_files(self._settings))
        except ConnectError as error:
            raise StartFailed(str(error)) from None

    def add_start(self, name: str, env: Mapping[str, str]) -> Login | None:
        """Return a login for one start of a worker whose variables name that of its pool, None where there is none."""
        if not self.by_role:
            return None
        from headrace.broker.membership.members import worker_id

        stem = Path(env.get(VARIABLE, "")).stem
        pool = next((login for login in self._logins() if login.role == "worker" and login.name == stem), None)
        if pool is None:
            return None
        login = Login("worker", pool.scope, worker_id(name))
        self._starts.add(login)
        return login

    def remove_start(self, login: Login) -> None:
        """Remove the login of a start. The server applies it with its next configuration."""
        self._starts.discard(login)
        self._remove_files(f"{login.name}.*")

    def _remove_files(self, pattern: str) -> None:
        for path in self._folder.glob(pattern):
            if path.stem.count("."):  # of a single worker
                path.unlink(missing_ok=True)

    @property
    def operator_context(self) -> str | None:
        """The context of the operator's login, or of the only one; None where the server asks for none."""
        return self.context(OPERATOR) if self._kind != "none" else None

    def frontend(self) -> dict[str, str]:
        return self.variables(Login("ingress"))

    def router(self) -> dict[str, str]:
        """Return the variables that give a router its login. It serves all pools of the namespace."""
        return self.variables(Login("router"))

    def worker(self, pool: Settings) -> dict[str, str]:
        return self.variables(worker_login(pool))

    def variables(self, login: Login) -> dict[str, str]:
        return {VARIABLE: self.context(login)} if self._kind != "none" else {}

    def context(self, login: Login) -> str:
        from headrace.jetstream.logins.nkey_logins import CONTEXT

        return str(self._folder / ((login.name if self.by_role else ONE_LOGIN) + CONTEXT))

    def _logins(self) -> Iterable[Login]:
        pools = {worker_login(pool) for _, pool in every_pool(self._settings)}
        tenants = {Login("batch", tenant_token(tenant)) for tenant in self._settings["server.tenants"]}
        return {OPERATOR, Login("ingress"), Login("router"), *FOR_PEOPLE, *pools, *tenants}


def tls_files(settings: Settings) -> dict[str, str]:
    given = {name: settings[f"nats.tls_{name}"] for name in ("ca", "cert", "key")}
    return {name: str(Path(path).expanduser().absolute()) for name, path in given.items() if path}


def worker_login(pool: Settings) -> Login:
    """Return the login of the workers of a pool; of all pools, where only the engine knows the model's name."""
    from headrace.workers.model_files import served_name

    name = served_name(worker_settings(pool))
    return Login("worker", pool_id(name, pool["namespace"]) if name else "")


def logins_by_hand(settings: Settings) -> Iterator[str]:
    """Yield the names of the logins for a worker that is started by hand: that of its pool, and that of all pools."""
    yield worker_login(settings).name
    yield Login("worker").name


# Gives each start of a worker a login of its own at the embedded NATS server, and takes it back when that process has ended.
#
# The id of a worker is part of the subjects that its login may publish to, and every start has another id. So the user is
# made right before the start: nats-server reads its configuration again, which no connection notices, and `headrace up` waits
# until the new login is let in.

_log = structlog.get_logger()

_AGAIN_S = 0.05
_LONGEST_S = 15.0  # until a new login is let in; a server that was just killed is back by then


class WorkerLogins:
    def __init__(self, logins: ServerLogins, server: EmbeddedServer | None, apply: Callable[[], None]) -> None:
        """`apply` puts the users of `logins` into the configuration of the server."""
        self._logins = logins
        self._server = server
        self._apply = apply
        self._changing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def of_start(self, name: str, env: Mapping[str, str]) -> AsyncIterator[Mapping[str, str]]:
        """Yield the variables of the login for one start of a part, none for a part that is no worker or without logins.

        `env`: the variables of the part, which name the login of its pool.
        """
        login = self._logins.add_start(name, env)
        if login is None or self._server is None:
            yield {}
            return
        try:
            await self._admit(login, self._server)
            yield self._logins.variables(login)
        finally:
            self._logins.remove_start(login)
            self._apply()
            self._server.reload()

    async def _admit(self, login: Login, server: EmbeddedServer) -> None:
        from headrace.jetstream.client import Connection, ConnectOptions

        async with self._changing:
            self._apply()
            self._logins.write_context(login, server.url)
            server.reload()
        error = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_S):
                while True:
                    await asyncio.sleep(_AGAIN_S)
                    try:
                        options = ConnectOptions.from_context(self._logins.context(login))
                        async with await Connection.connect(options, subjects=self._logins.subjects):
                            return
                    except JetStreamError as refused:
                        error = str(refused)
        _log.warning("login.not_taken", login=login.name, error=error)  # the worker fails, and is started again
