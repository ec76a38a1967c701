"""Looks for the results of single jobs with few reads: those that are asked for during one read share the next one."""

from __future__ import annotations

import asyncio

from headrace.broker.durable.result_store import ResultStore
from headrace.broker.messages import JobResult
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.tasks import TaskScope


class ResultLookup:
    """Joins reads of single results. Its questions are bounded by the jobs that are checked at once.

    One read is under way at a time: the faster jobs come, the more of them share one.
    """

    def __init__(self, results: ResultStore, tasks: TaskScope) -> None:
        self._results = results
        self._tasks = tasks
        self._asked: list[tuple[tuple[str, str], asyncio.Future[JobResult | None]]] = []
        self._reading = False

    async def get(self, tenant: str, token: str) -> JobResult | None:
        """Return the result of a job, None if none is seen. Raises JetStreamError."""
        future: asyncio.Future[JobResult | None] = asyncio.get_running_loop().create_future()
        self._asked.append(((tenant, token), future))
        if not self._reading:
            self._reading = True
            self._tasks.spawn(self._read())
        return await future

    async def _read(self) -> None:
        try:
            await asyncio.sleep(0)  # the other jobs of this turn ask first
            while self._asked:
                asked, self._asked = self._asked, []
                await self._answer(asked)
        finally:
            self._reading = False

    async def _answer(self, asked: list[tuple[tuple[str, str], asyncio.Future[JobResult | None]]]) -> None:
        try:
            found = await self._results.get_all([job for job, _ in asked])
        except JetStreamError as error:
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for job, future in asked:
            if not future.done():  # its job may have been forgotten meanwhile
                future.set_result(found.get(job))
