"""Stores the crashes of a job in its stream before its judge lets another worker go on with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.broker.durable.carrier.carrier_deps import CarrierDeps, known
from headrace.broker.durable.carrier.held_job import HeldJob
from headrace.broker.durable.errors import CarrierLost
from headrace.broker.durable.stream_writer import read_stream
from headrace.broker.messages import HistoryEntry


class CrashWriter:
    """Implements `CrashRecorder` for one run of a job; the run's own loop writes what is due."""

    def __init__(self, deps: CarrierDeps, held: HeldJob) -> None:
        self._deps = deps
        self._held = held
        self._stored = set(held.stored.history)
        self._due: set[HistoryEntry] = set()

    def recorded(self, crashes: Sequence[HistoryEntry]) -> bool:
        """Return whether all of these are stored. Those that are not will be."""
        missing = set(crashes) - self._stored
        if missing - self._due:
            self._due |= missing
            self._held.rouse()
        return not missing

    async def write(self) -> None:
        """Append the crashes that are not stored yet. Raises CarrierLost for a durable stream that another writes."""
        while self._due:
            due = sorted(self._due)
            try:
                await self._held.writer.append("crash", history=due)
            except CarrierLost:
                if self._held.job.durable:
                    raise
                await self._read_on()  # copies of a plain job may run beside each other: its result decides
                if self._held.stop:
                    return
            else:
                self._stored.update(due)
                self._held.stored.history += [crash for crash in due if crash not in self._held.stored.history]
                self._due.difference_update(due)

    async def _read_on(self) -> None:
        job, retry_s = self._held.job, self._deps.settings.timing.retry_s
        await asyncio.sleep(retry_s)
        state = await known(
            lambda: read_stream(self._deps.messaging, self._deps.subjects, job.tenant, job.token),
            what="stream",
            retry_s=retry_s,
        )
        if state.end is not None:  # a canceller's: nothing may follow it
            self._held.halt(state.end.status or "cancelled")
        elif state.last_seq > self._held.writer.last_seq:
            self._held.writer.continue_from(state)
