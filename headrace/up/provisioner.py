"""Makes streams, buckets and consumers of a deployment as its operator, where the server asks for logins and the parts may not.

Streams are made once at the start and again after each restart of the server, consumers when a part asks for them
(`headrace.jetstream.logins.steward`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from headrace.base.errors import StartFailed
from headrace.config.build_settings import connect_options, subjects
from headrace.config.settings import Settings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.tasks import TaskScope

if TYPE_CHECKING:
    from headrace.jetstream.client import Connection

_log = structlog.get_logger()


class Provisioner:
    """The operator's connection of `headrace up`."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._tasks = TaskScope()

    async def start(self, settings: Settings) -> None:
        """Make the streams, again after each reconnect, and make consumers for parts until `stop`.

        `settings` log in as the operator. Raises StartFailed.
        """
        from headrace.jetstream.client import Connection
        from headrace.jetstream.logins.steward import Steward
        from headrace.jetstream.provision import ensure_topology
        from headrace.jetstream.topology import Topology

        try:
            options = connect_options(settings, name="headrace up (operator)")
            topology = Topology(subjects(settings), replicas=options.replicas)
            connection = await Connection.connect(options, subjects=topology.subjects)
            self._connection = connection
            await ensure_topology(connection, topology)
            await self._tasks.__aenter__()
            await Steward(connection, topology, self._tasks).start()
        except JetStreamError as error:
            await self.stop()
            raise StartFailed(f"the streams cannot be made: {error}") from error

        async def again() -> None:  # memory streams vanish with a server restart
            await ensure_topology(connection, topology)

        connection.on_reconnect(again)
        _log.info("up.provisioned")

    async def stop(self) -> None:
        """Close the connection, which ends what is still being made."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        await self._tasks.__aexit__(None, None, None)
