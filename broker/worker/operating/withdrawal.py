"""Takes a worker out of service while its process, its lease and its engine stay, and puts it back.

Meanwhile it is announced as draining, so routers and other workers pass it by.  What it could not finish within the grace
period goes on elsewhere, as in a drain.  A change of role, a sleep and a pause are done between the two.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from headrace.broker.codec import encode
from headrace.broker.retry import until_done
from headrace.broker.worker.operating.evacuation import Evacuation
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper

Reason = Literal["role", "sleep", "pause"]
_STANDS = {"role": "is changing its role", "sleep": "sleeps: wake it first", "pause": "is paused: resume it first"}


class Withdrawal:
    """Withdraws one worker, for one reason at a time (`WorkerState.withdrawn`)."""

    def __init__(
        self, deps: WorkerDeps, state: WorkerState, lease: LeaseKeeper, runs: RunLifecycle, evacuation: Evacuation
    ) -> None:
        self._retry_s = deps.timing.retry_s
        self._state = state
        self._lease = lease
        self._runs = runs
        self._evacuation = evacuation

    async def begin(self, reason: Reason) -> None:
        """Take nothing more, announce it, and move what is stored for this worker and not started."""
        self._state.withdrawn = reason
        await self.announce(draining=True)
        self._state.changed()
        await self._evacuation.move_unstarted(reason)

    async def empty(self, grace_s: float) -> None:
        """Wait for the runs within the grace period, then move the rest. Jobs for other workers end likewise."""
        state = self._state
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        await self._evacuation.wait(deadline)
        for run in state.runs:
            await self._runs.move(run, suspect=None, reason=state.withdrawn)
        await self.leave_prefills(max(0.0, deadline - loop.time()))

    async def leave_prefills(self, grace_s: float) -> None:
        """Finish the prompts that are computed for other workers within the grace period, and give the rest back."""
        await self._evacuation.leave_prefills(grace_s)

    async def announce(self, **changes: Any) -> None:
        """Change fields of the lease's value and publish it. A drain that begins meanwhile announces itself."""
        state = self._state
        if state.draining:
            changes.pop("draining", None)
        state.update_member(**changes)
        await until_done(
            lambda: self._lease.update(encode(state.member)),
            event=f"{state.withdrawn or 'worker'}.retry",
            retry_s=self._retry_s,
            wanted=lambda: not state.draining,
            worker=state.worker,
        )

    def end(self) -> None:
        """Take work again. The caller has announced it before; after an error the lease may say otherwise."""
        self._state.withdrawn = ""
        self._state.changed()

    @property
    def refusal(self) -> str:
        """Return the reason for which nothing else can be done with this worker now; empty if there is none."""
        worker, why = self._state.worker, self._state.withdrawn
        if self._state.draining:
            return f"worker {worker} is draining"
        return f"worker {worker} {_STANDS[why]}" if why else ""
