"""Reads results by their names, for the login of a tenant, which may read no stream as a whole.

The end of a job is told once at a subject of the tenant (`hr.jobev.<tenant>.<job>`); the result is read when that is heard, and
every few seconds in case it was missed.
"""

from __future__ import annotations

import asyncio

import msgspec

from headrace.broker.messages import JobProgress, JobResult
from headrace.client.errors import ClientError
from headrace.client.results import Result, ResultReader
from headrace.jetstream.client import Connection
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects

MOST_HEARD = 4096  # ends that wait to be read; what is over that is found by the next look
READERS = 16


def tenant_of_login(options: ConnectOptions, prefix: str) -> str | None:
    """Return the tenant, as a subject token, that a login is limited to; None for one of another role or without a role."""
    role, _, tenant = (options.steward or "").removeprefix(f"{prefix}.steward.").partition(".")
    return tenant if role == "batch" else None


class NamedResults(ResultReader):
    """The results of one tenant, read one by one over the connection of its login."""

    def __init__(self, connection: Connection, subjects: Subjects, tenant: str) -> None:
        super().__init__(connection, subjects, tenant)
        self._connection = connection
        self._heard: asyncio.Queue[str] = asyncio.Queue(MOST_HEARD)

    async def _read(self) -> None:
        ends = f"{self._subjects.job_events(self._tenant, 'x').rpartition('.')[0]}.*"
        listening = await self._connection.subscribe(ends, self._on_event)
        self._started.set()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(READERS):
                    group.create_task(self._read_heard())
        finally:
            await listening.unsubscribe()

    def _on_event(self, message: Message) -> None:
        try:
            event = msgspec.json.decode(message.data, type=JobProgress)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        token = message.subject.rpartition(".")[2]
        if event.event == "finished" and token in self._waiting and not self._heard.full():
            self._heard.put_nowait(token)

    async def _read_heard(self) -> None:
        while True:
            token = await self._heard.get()
            future = self._waiting.get(token)
            if future is not None and not future.done():
                await self._look(token, future)

    async def _find(self, token: str) -> bytes | None:
        found = await self._connection.last_message(self._stream, self._subjects.result(self._tenant, token))
        return None if found is None else found.data

    async def _load(self, data: bytes) -> Result:
        try:
            stored = msgspec.json.decode(data, type=JobResult)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ClientError(f"a result cannot be read: {error}") from error
        if stored.object is not None:
            raise ClientError(
                f"the result of job {stored.id!r} has {stored.object.size} bytes, more than a message holds, and the login of "
                "a tenant reads messages only: an operator reads it with `headrace jobs show`"
            )
        return Result(stored, stored.response)
