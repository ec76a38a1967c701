"""Change of a worker's role: take nothing new, finish or hand over the runs, have the engine change, and serve again.

Meanwhile the worker is announced as draining, so routers and other workers pass it by.  Unlike a worker that leaves, it keeps
its lease, its engine and its cache.  Prompts and requests that it could not finish within the grace period go on elsewhere, as
in a drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from headrace.broker.codec import encode
from headrace.broker.membership.mover import Mover
from headrace.broker.prefill.server import PrefillServer
from headrace.broker.retry import until_done
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import HeadraceError
from headrace.jetstream.lease import LeaseKeeper

log = structlog.get_logger()

POLL_S = 0.05


class RoleChange:
    """Changes the role of one worker, one change at a time."""

    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        lease: LeaseKeeper,
        mover: Mover,
        runs: RunLifecycle,
        prefill: PrefillServer | None,
        *,
        set_role: Callable[[str], Awaitable[None]] | None,
    ) -> None:
        """`set_role` has the engine change its role; None: it cannot."""
        self._retry_s = deps.timing.retry_s
        self._state = state
        self._lease = lease
        self._mover = mover
        self._runs = runs
        self._prefill = prefill
        self._set_role = set_role

    async def change(self, role: str, grace_s: float) -> str:
        """Change to `role`. Returns the reason if it is not changed, or nothing."""
        state = self._state
        member = state.member
        if state.changing_role:
            return f"worker {member.worker} is changing its role already"
        if role == member.role:
            return ""
        if self._set_role is None or role not in member.roles:
            can = ", ".join(sorted({*member.roles, member.role}))
            return f"worker {member.worker} cannot serve as {role!r}: its engine was started for {can}"
        log.info("worker.role_changing", worker=member.worker, before=member.role, after=role, grace_s=grace_s)
        state.changing_role = True
        try:
            await self._announce(member.role, draining=True)
            state.changed()
            await self._finish(grace_s)
            refusal = await self._change_engine(role)
            await self._announce(member.role if refusal else role, draining=False)
        finally:
            state.changing_role = False
            state.changed()
        log.info("worker.role_changed", worker=member.worker, role=state.member.role, refused=refusal or None)
        return refusal

    async def _announce(self, role: str, *, draining: bool) -> None:
        state = self._state
        state.update_member(role=role, draining=draining)
        await until_done(
            lambda: self._lease.update(encode(state.member)),
            event="role.retry",
            retry_s=self._retry_s,
            wanted=lambda: not state.draining,  # a drain that begins meanwhile announces itself
            worker=state.worker,
        )

    async def _finish(self, grace_s: float) -> None:
        """Empty the engine: wait for the runs within the grace period, then move the rest."""
        state = self._state
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        held = {run.seq for run in state.runs}
        await self._mover.move_all(state.worker, died=False, reason="role", keep=held)
        while len(state.runs) and loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        for run in state.runs:
            await self._runs.move(run, suspect=None, reason="role")
        if self._prefill is not None:
            await self._prefill.leave(max(0.0, deadline - loop.time()))

    async def _change_engine(self, role: str) -> str:
        if self._set_role is None:
            return "this worker cannot change its role"
        try:
            await self._set_role(role)
        except HeadraceError as error:
            return str(error)
        return ""
