"""Publishes the cache events of all data-parallel ranks of a worker, each as a place of its own (`headrace.broker.places`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.workers.kv.publisher import KvPublisher


class RankPublishers:
    """Runs a publisher per rank. Implements `headrace.broker.worker.ports.KvPort`."""

    def __init__(self, publishers: Sequence[KvPublisher]) -> None:
        self._publishers = publishers

    async def run(self, lease_held: Callable[[], bool]) -> None:
        """Publish until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for publisher in self._publishers:
                tasks.create_task(publisher.run(lease_held))

    def lease_gained(self) -> None:
        for publisher in self._publishers:
            publisher.lease_gained()

    def lease_lapsed(self) -> None:
        for publisher in self._publishers:
            publisher.lease_lapsed()

    def ask_dump(self) -> str:
        return next(filter(None, [publisher.ask_dump() for publisher in self._publishers]), "")

    @property
    def state(self) -> str:
        return next((publisher.state for publisher in self._publishers if publisher.state != "ok"), "ok")
