"""How a worker changes its role: take nothing new, finish or hand over what it has, have the engine change, serve anew.

Meanwhile it is announced as draining, so routers and other workers pass it by; unlike a worker that leaves, it keeps its lease,
its engine and its cache.  Prompts and requests that it could not finish within the grace period go on elsewhere, as in a drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
import structlog

from headrace.broker.codec import encode
from headrace.broker.membership.mover import Mover
from headrace.broker.retry import until_done
from headrace.jetstream.errors import HeadraceError
from headrace.jetstream.lease import LeaseKeeper

if TYPE_CHECKING:
    from headrace.broker.worker.session import WorkerSession

log = structlog.get_logger()

POLL_S = 0.05


class RoleChange:
    """Changes of role of one worker session, one at a time."""

    def __init__(
        self,
        session: WorkerSession,
        lease: LeaseKeeper,
        mover: Mover,
        set_role: Callable[[str], Awaitable[None]] | None,
        *,
        retry_s: float,
    ) -> None:
        self._session = session
        self._lease = lease
        self._mover = mover
        self._set_role = set_role
        self._retry_s = retry_s
        self.running = False

    async def change(self, role: str, grace_s: float) -> str:
        """Returns why the role is not changed, or nothing."""
        member = self._session.member
        if self.running:
            return f"worker {member.worker} is changing its role already"
        if role == member.role:
            return ""
        if self._set_role is None or role not in member.roles:
            can = ", ".join(sorted({*member.roles, member.role}))
            return f"worker {member.worker} cannot serve as {role!r}: its engine was started for {can}"
        log.info("worker.role_changing", worker=member.worker, before=member.role, after=role, grace_s=grace_s)
        self.running = True
        try:
            await self._announce(member.role, draining=True)
            self._session.balance()
            await self._finish(grace_s)
            refusal = await self._engine(role)
            await self._announce(member.role if refusal else role, draining=False)
        finally:
            self.running = False
            self._session.balance()
        log.info("worker.role_changed", worker=member.worker, role=self._session.member.role, refused=refusal or None)
        return refusal

    async def _announce(self, role: str, *, draining: bool) -> None:
        session = self._session
        session.member = msgspec.structs.replace(session.member, role=role, draining=draining)
        await until_done(
            lambda: self._lease.update(encode(session.member)),
            event="role.retry",
            retry_s=self._retry_s,
            wanted=lambda: not session.draining,  # who leaves meanwhile announces that
            worker=session.worker,
        )

    async def _finish(self, grace_s: float) -> None:
        """No sequence is in the engine afterwards."""
        session = self._session
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        held = {run.seq for run in session.runs}
        await self._mover.move_all(session.worker, died=False, reason="role", keep=held)
        while len(session.runs) and loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        for run in session.runs:
            await session.move(run, suspect=None, reason="role")
        if session.prefill_server is not None:
            await session.prefill_server.leave(max(0.0, deadline - loop.time()))

    async def _engine(self, role: str) -> str:
        if self._set_role is None:
            return "this worker cannot change its role"
        try:
            await self._set_role(role)
        except HeadraceError as error:
            return str(error)
        return ""
