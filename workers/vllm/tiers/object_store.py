"""Keeps blocks in an object store of the broker, where every worker of the pool finds them, also after a restart.

The server bounds the store: the oldest blocks make room, and none is kept for longer than the store's age. Nothing here waits
for a server that is gone; the connection, and the store, are made when they are first needed, and again after they have failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from headrace.jetstream.client import Connection
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.errors import JetStreamError, NotConnected, ObjectCorrupt, ObjectNotFound
from headrace.jetstream.objects.store import ObjectStore
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import BLOCKS, Topology
from headrace.workers.vllm.tiers.block_record import DamagedBlock
from headrace.workers.vllm.tiers.block_store import BlockAbsent, StoreFailed


class ObjectBlockStore:
    """The blocks of a pool."""

    def __init__(self, options: ConnectOptions, subjects: Subjects, *, pool: str) -> None:
        self._options = options
        self._subjects = subjects
        self._pool = pool
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    async def held(self, names: Sequence[str]) -> Collection[str]:
        try:
            return await (await self._objects()).present(names)
        except JetStreamError as error:
            raise StoreFailed(str(error)) from error

    async def read(self, name: str) -> bytes:
        try:
            return await (await self._objects()).get(name)
        except ObjectNotFound:
            raise BlockAbsent(name) from None
        except ObjectCorrupt as error:
            raise DamagedBlock(str(error)) from error
        except JetStreamError as error:
            raise StoreFailed(str(error)) from error

    async def write(self, name: str, record: bytes) -> Sequence[str]:
        try:
            await (await self._objects()).put(name, record)
        except JetStreamError as error:
            raise StoreFailed(str(error)) from error
        return ()

    async def remove(self, name: str) -> None:
        try:
            await (await self._objects()).delete(name)
        except JetStreamError as error:
            raise StoreFailed(str(error)) from error

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _objects(self) -> ObjectStore:
        async with self._connecting:
            if self._connection is None:
                connection = await Connection.connect(self._options, subjects=self._subjects)
                try:
                    await ensure_on_demand(connection, Topology(self._subjects).blocks(self._pool))
                except BaseException:
                    await connection.close()
                    raise
                self._connection = connection
        if not self._connection.connected:
            raise NotConnected("the broker is gone")
        return self._connection.objects(self._subjects.pool_bucket(BLOCKS, self._pool))
