"""A nats-server that asks for logins, with the streams of a deployment and a steward."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.logins.nkey_logins import accounts_config, make_keys, write_context
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.logins.steward import Steward
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import Topology

S = Subjects("hr")


class Guarded(NamedTuple):
    """A deployment's server with logins, its operator, and a way to log in."""

    folder: Path
    operator: Connection
    server: EmbeddedServer

    async def as_(self, login: Login) -> Connection:
        options = ConnectOptions.from_context(str(self.folder / f"{login.name}.json"), name=login.name)
        return await Connection.connect(options, subjects=S)


@contextlib.asynccontextmanager
async def guarded_server(
    folder: Path, logins: Sequence[Login], *, edited: Callable[[str], str] = lambda config: config
) -> AsyncIterator[Guarded]:
    """Run a server with these logins, an operator's among them. `edited` may change its configuration before."""
    topology, files = Topology(S), folder / "logins"
    config = edited(accounts_config(topology, make_keys(files, logins)))
    with EmbeddedServer(folder / "nats", ServerSettings(extra=config)) as server:
        for login in logins:
            write_context(files, login, url=server.url, prefix="hr")
        options = ConnectOptions.from_context(str(files / "operator.json"))
        async with await Connection.connect(options, subjects=S) as operator, TaskScope() as tasks:
            await ensure_topology(operator, topology)
            await Steward(operator, topology, tasks).start()
            yield Guarded(files, operator, server)
