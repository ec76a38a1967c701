"""Commits results of lines of batches together: those of some milliseconds leave in one write and are waited for once.

No client waits for one of them alone. A result that is not stored at this first try is committed by itself, as any other is.
"""

from __future__ import annotations

import asyncio

from headrace.broker.durable.result_store import ResultStore
from headrace.broker.messages import JobResult


class JoinedCommits:
    """The results that wait for the next write. The first one that waits makes it, `gap_s` later, for all of them."""

    def __init__(self, results: ResultStore, gap_s: float) -> None:
        self._results = results
        self._gap_s = gap_s
        self._waiting: list[tuple[tuple[str, str, JobResult], asyncio.Future[bool]]] = []

    async def commit(self, tenant: str, token: str, result: JobResult) -> JobResult:
        """Store a result unless the job has one, and return the one that stands. It tries until it is cancelled."""
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(((tenant, token, result), stored))
        if len(self._waiting) == 1:
            await self._store()
        return result if await stored else await self._results.commit(tenant, token, result)

    async def _store(self) -> None:
        waiting = self._waiting
        done: list[bool] = []
        try:
            await asyncio.sleep(self._gap_s)
            self._waiting = []
            done = await self._results.store_all([result for result, _ in waiting])
        finally:  # if this one is cancelled or fails, each of the others is committed by itself
            if self._waiting is waiting:
                self._waiting = []
            for place, (_, stored) in enumerate(waiting):
                if not stored.done():
                    stored.set_result(place < len(done) and done[place])
