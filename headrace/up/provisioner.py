"""Makes the streams and buckets of a deployment as its operator, once at the start and again after each restart of the server.

The parts may not where the server asks for logins: they only check that everything is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from headrace.config.build_settings import connect_options, subjects
from headrace.config.settings import Settings
from headrace.errors import StartFailed
from headrace.jetstream.errors import JetStreamError

if TYPE_CHECKING:
    from headrace.jetstream.client import Connection

_log = structlog.get_logger()


class Provisioner:
    """The operator's connection of `headrace up`."""

    def __init__(self) -> None:
        self._connection: Connection | None = None

    async def start(self, settings: Settings) -> None:
        """Make the streams, and again after each reconnect. `settings` log in as the operator. Raises StartFailed."""
        from headrace.jetstream.client import Connection
        from headrace.jetstream.provision import ensure_topology
        from headrace.jetstream.topology import Topology

        names = subjects(settings)
        try:
            connection = await Connection.connect(connect_options(settings, name="headrace up (operator)"), subjects=names)
            self._connection = connection
            await ensure_topology(connection, Topology(names))
        except JetStreamError as error:
            await self.stop()
            raise StartFailed(f"the streams cannot be made: {error}") from error

        async def again() -> None:  # memory streams vanish with a server restart
            await ensure_topology(connection, Topology(names))

        connection.on_reconnect(again)
        _log.info("up.provisioned")

    async def stop(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
