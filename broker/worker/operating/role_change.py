"""Change of a worker's role: withdraw it, finish or hand over the runs, have the engine change, and serve again.

Unlike a worker that leaves, it keeps its lease, its engine and its cache.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.worker.operating.withdrawal import Withdrawal
from headrace.broker.worker.state import WorkerState

log = structlog.get_logger()


class RoleChange:
    """Changes the role of one worker, one change at a time."""

    def __init__(
        self, state: WorkerState, withdrawal: Withdrawal, *, set_role: Callable[[str], Awaitable[None]] | None
    ) -> None:
        """`set_role` has the engine change its role; None: it cannot."""
        self._state = state
        self._withdrawal = withdrawal
        self._set_role = set_role

    async def change(self, role: str, grace_s: float) -> str:
        """Change to `role`. Returns the reason if it is not changed, or nothing."""
        state = self._state
        member = state.member
        if state.withdrawn == "role":
            return f"worker {member.worker} is changing its role already"
        if state.withdrawn:
            return self._withdrawal.refusal
        if role == member.role:
            return ""
        if self._set_role is None or role not in member.roles:
            can = ", ".join(sorted({*member.roles, member.role}))
            return f"worker {member.worker} cannot serve as {role!r}: its engine was started for {can}"
        log.info("worker.role_changing", worker=member.worker, before=member.role, after=role, grace_s=grace_s)
        try:
            await self._withdrawal.begin("role")
            await self._withdrawal.empty(grace_s)
            refusal = await self._change_engine(role)
            await self._withdrawal.announce(role=member.role if refusal else role, draining=False)
        finally:
            self._withdrawal.end()
        log.info("worker.role_changed", worker=member.worker, role=state.member.role, refused=refusal or None)
        return refusal

    async def _change_engine(self, role: str) -> str:
        if self._set_role is None:
            return "this worker cannot change its role"
        try:
            await self._set_role(role)
        except HeadraceError as error:
            return str(error)
        return ""
