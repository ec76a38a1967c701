"""Drain and engine death of a worker: announced first, then runs finish or are handed over, and only then the lease goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import structlog

from headrace.broker.codec import encode
from headrace.broker.membership.members import drained_key
from headrace.broker.membership.mover import Mover
from headrace.broker.prefill.server import PrefillServer
from headrace.broker.protocol.crashes import ENGINE_DEATH, NAMED_DEATH
from headrace.broker.protocol.run import Run
from headrace.broker.retry import until_done
from headrace.broker.worker.operating.evacuation import Evacuation
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper

log = structlog.get_logger()


class Drainer:
    """The drain of one worker. `done` is set when nothing is left to do but to release the lease."""

    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        lease: LeaseKeeper,
        mover: Mover,
        runs: RunLifecycle,
        prefill: PrefillServer | None,
        *,
        stop_taking: Callable[[], Awaitable[None]],
    ) -> None:
        """`stop_taking` withdraws every open pull."""
        self._records = deps.messaging.bucket(deps.subjects.bucket("state"))
        self._retry_s = deps.timing.retry_s
        self._state = state
        self._lease = lease
        self._mover = mover
        self._runs = runs
        self._prefill = prefill
        self._evacuation = Evacuation(state, mover, runs, prefill)
        self._stop_taking = stop_taking
        self.done = asyncio.Event()

    async def drain(self, grace_s: float) -> None:
        """Finish what runs within the grace period, and hand the rest over. A second call waits for the first."""
        state = self._state
        if state.draining:
            await self.done.wait()
            return
        log.info("worker.draining", worker=state.worker, runs=len(state.runs), grace_s=grace_s)
        await self._announce()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        await self._evacuation.move_unstarted("drain")
        await self._evacuation.wait(deadline)
        await self._hand_over(reason="drain")
        await self._evacuation.leave_prefills(max(0.0, deadline - loop.time()))
        self.done.set()

    async def engine_died(self, why: str, named: Collection[str] = ()) -> None:
        """Move all runs, as their worker can do itself. Those that were in the engine have crashed.

        `named`: the requests that the engine has named as the cause; then only these have.
        """
        state = self._state
        state.engine_dead = True
        log.error("engine.died", worker=state.worker, why=why, runs=len(state.runs), named=sorted(named))
        in_engine = {run for run in state.runs if run.in_engine}
        blamed = {run for run in in_engine if run.id in named} or in_engine
        suffix = NAMED_DEATH if blamed and all(run.id in named for run in blamed) else ENGINE_DEATH
        await self._announce()
        await self._hand_over(reason="engine_died", suspect=f"{state.worker}{suffix}", blamed=blamed)
        if self._prefill is not None:
            self._prefill.fail_all(f"its engine is dead: {why}")
            await self._prefill.leave(0.0)
        self.done.set()

    async def _announce(self) -> None:
        """Announce the drain before anything is moved, so that no mover takes it for a crash.

        The record in the bucket outlives the lease.
        """
        self._state.draining = True
        await self._stop_taking()

        async def announce() -> None:
            await self._records.put(drained_key(self._state.worker), b"1")
            self._state.update_member(draining=True)
            await self._lease.update(encode(self._state.member))

        await until_done(announce, event="drain.retry", retry_s=self._retry_s, worker=self._state.worker)

    async def _hand_over(self, *, reason: str, suspect: str | None = None, blamed: Collection[Run] = ()) -> None:
        for run in self._state.runs:
            found = suspect if run in blamed else None
            await self._runs.move(run, suspect=found, reason=reason, group=len(blamed) if found else 0)
        await self._mover.move_all(self._state.worker, died=False, reason=reason)
