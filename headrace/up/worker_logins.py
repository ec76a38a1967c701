"""Gives each start of a worker a login of its own at the embedded NATS server, and takes it back when that process has ended.

The id of a worker is part of the subjects that its login may publish to, and every start has another id.  So the user is made
right before the start: nats-server reads its configuration again, which no connection notices, and `headrace up` waits until
the new login is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

import structlog

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.logins.roles import Login
from headrace.up.server_logins import ServerLogins

_log = structlog.get_logger()

_AGAIN_S = 0.05
_LONGEST_S = 15.0  # until a new login is let in; a server that was just killed is back by then


class WorkerLogins:
    """The logins of the workers that run now."""

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
