"""How a worker leaves: announce it, finish or hand over, and only then give up the lease."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import structlog

from headrace.broker.codec import encode
from headrace.broker.membership.members import drained_key
from headrace.broker.membership.mover import Mover
from headrace.broker.protocol.crashes import ENGINE_DEATH
from headrace.broker.protocol.run import RunState
from headrace.broker.retry import until_done
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

if TYPE_CHECKING:
    from headrace.broker.worker.session import WorkerSession

log = structlog.get_logger()

POLL_S = 0.05


class Drainer:
    """Drain and engine death of one worker session."""

    def __init__(
        self,
        session: WorkerSession,
        messaging: Messaging,
        subjects: Subjects,
        lease: LeaseKeeper,
        mover: Mover,
        *,
        retry_s: float,
    ) -> None:
        self._session = session
        self._state = messaging.bucket(subjects.bucket("state"))
        self._lease = lease
        self._mover = mover
        self._retry_s = retry_s
        self.announced = False
        self.engine_dead = False
        self.done = asyncio.Event()

    async def drain(self, grace_s: float) -> None:
        """Finish what runs within the grace period, hand the rest over."""
        if self.announced:
            await self.done.wait()
            return
        worker = self._session.worker
        runs = self._session.runs
        log.info("worker.draining", worker=worker, runs=len(runs), grace_s=grace_s)
        await self._announce()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        await self._move_unstarted()
        while len(runs) and loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        await self._hand_over(suspect=None, reason="drain")
        if self._session.prefill_server is not None:
            await self._session.prefill_server.leave(max(0.0, deadline - loop.time()))
        self.done.set()

    async def engine_died(self, why: str) -> None:
        """The runs are moved; those that were in the engine count as crashed, although their worker moves them itself."""
        self.engine_dead = True
        log.error("engine.died", worker=self._session.worker, why=why, runs=len(self._session.runs))
        await self._announce()
        await self._hand_over(suspect=f"{self._session.worker}{ENGINE_DEATH}", reason="engine_died")
        if self._session.prefill_server is not None:
            self._session.prefill_server.fail_all(f"its engine is dead: {why}")
            await self._session.prefill_server.leave(0.0)
        self.done.set()

    async def _announce(self) -> None:
        """Before anything else: what a mover sees of this worker from now on is no crash. The record outlives the lease."""
        self.announced = True
        await self._session.stop_taking()
        session = self._session

        async def announce() -> None:
            await self._state.put(drained_key(session.worker), b"1")
            session.member = msgspec.structs.replace(session.member, draining=True)
            await self._lease.update(encode(session.member))

        await until_done(announce, event="drain.retry", retry_s=self._retry_s, worker=session.worker)

    async def _move_unstarted(self) -> None:
        """What is stored for this worker but not running yet does not wait for the grace period."""
        session = self._session
        for run in session.runs:
            if run.state is RunState.WAITING:
                await session.move(run, suspect=None, reason="drain")
        held = {run.seq for run in session.runs}
        await self._mover.move_all(session.worker, died=False, reason="drain", keep=held)

    async def _hand_over(self, *, suspect: str | None, reason: str) -> None:
        session = self._session
        for run in session.runs:
            await session.move(run, suspect=suspect if run.in_engine else None, reason=reason)
        await self._mover.move_all(session.worker, died=False, reason=reason)
