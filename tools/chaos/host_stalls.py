"""Measures stalls of the host itself: pauses that no injected fault explains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.ledger import Ledger

_POLL_S = 0.05
_ASK_EVERY_S = 0.25
_KEY = "chaos.pulse"
_AFTERWARDS_S = 2.0  # The server may still be slow for so long after a fault.


class HostStalls:
    """Measures the longest stalls of this process and of the NATS server.

    `own_s`: the longest time that this process did not run when it should have. `server_s`: the longest time that the server
    took to store a few bytes while no fault was made to it.
    """

    def __init__(self, connection: Connection, names: Subjects, ledger: Ledger, *, clock: Callable[[], float]) -> None:
        self.own_s = 0.0
        self.server_s = 0.0
        self._bucket = connection.bucket(names.bucket("state"))
        self._ledger = ledger
        self._clock = clock

    async def run(self) -> None:
        """Measure until cancelled."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._watch_self())
            both.create_task(self._watch_server())

    async def _watch_self(self) -> None:
        while True:
            began = self._clock()
            await asyncio.sleep(_POLL_S)
            self.own_s = max(self.own_s, self._clock() - began - _POLL_S)

    async def _watch_server(self) -> None:
        while True:
            began = self._clock()
            with suppress(JetStreamError):  # A write that timed out counts with the time it took.
                await self._bucket.put(_KEY, b"")
            ended = self._clock()
            if not self._hurt(began, ended):
                self.server_s = max(self.server_s, ended - began)
            await asyncio.sleep(_ASK_EVERY_S)

    def _hurt(self, first_s: float, last_s: float) -> bool:
        return any(
            injury.kind.startswith("nats") and injury.at_s <= last_s and first_s <= injury.over_s + _AFTERWARDS_S
            for injury in self._ledger.injuries
        )
