"""Empties a worker: what is stored for it goes elsewhere at once, what runs gets a grace period and then goes on elsewhere."""

from __future__ import annotations

import asyncio

from headrace.broker.membership.mover import Mover
from headrace.broker.prefill.server import PrefillServer
from headrace.broker.protocol.run import RunState
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.state import WorkerState

POLL_S = 0.05


class Evacuation:
    """The parts of a drain and of a withdrawal that are the same."""

    def __init__(self, state: WorkerState, mover: Mover, runs: RunLifecycle, prefill: PrefillServer | None) -> None:
        self._state = state
        self._mover = mover
        self._runs = runs
        self._prefill = prefill

    async def move_unstarted(self, reason: str) -> None:
        """Move what is stored for this worker and not running: it does not wait for the grace period."""
        state = self._state
        for run in state.runs:
            if run.state is RunState.WAITING:
                await self._runs.move(run, suspect=None, reason=reason)
        held = {run.seq for run in state.runs}
        await self._mover.move_all(state.worker, died=False, reason=reason, keep=held)

    async def wait(self, deadline: float) -> None:
        """Wait until nothing runs, but not longer than to the deadline, in the event loop's time."""
        loop = asyncio.get_running_loop()
        while len(self._state.runs) and loop.time() < deadline:
            await asyncio.sleep(POLL_S)

    async def leave_prefills(self, grace_s: float) -> None:
        """Finish the prompts that are computed for other workers within the grace period, and give the rest back."""
        if self._prefill is not None:
            await self._prefill.leave(grace_s)
