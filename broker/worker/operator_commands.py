"""What operators tell a worker to do, in the background, and what they can ask it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.broker.codec import encode
from headrace.broker.messages import Done, Inspection, LoadAdapter, UnloadAdapter
from headrace.broker.worker.adapters import AdapterChanges
from headrace.broker.worker.ports import KvPort
from headrace.broker.worker.role_change import RoleChange

if TYPE_CHECKING:
    from headrace.broker.worker.session import WorkerSession


class OperatorCommands:
    """The commands of one worker session. `tasks` must be set before the first; answers go to `reply` when it is through."""

    def __init__(
        self,
        session: WorkerSession,
        adapters: AdapterChanges,
        role_change: RoleChange,
        *,
        kv: KvPort | None,
        drain_grace_s: float,
    ) -> None:
        """`drain_grace_s`: where a command names no time of grace."""
        self._session = session
        self._adapters = adapters
        self._role_change = role_change
        self._kv = kv
        self._drain_grace_s = drain_grace_s
        self.tasks: asyncio.TaskGroup | None = None

    def begin_drain(self, grace_s: float | None) -> None:
        if self.tasks is not None and not self._session.draining:
            self.tasks.create_task(self._session.drain(self._drain_grace_s if grace_s is None else grace_s))

    def begin_role(self, role: str, grace_s: float | None, reply: str) -> None:
        """Finish the work of the present role within the grace period, hand over the rest, and serve the other one."""

        async def change() -> None:
            worker = self._session.worker
            if self._session.draining:
                refusal = f"worker {worker} is draining"
            else:
                refusal = await self._role_change.change(role, self._drain_grace_s if grace_s is None else grace_s)
            self._session.reply(reply, encode(Done(ok=not refusal, message=refusal or f"worker {worker} serves as {role}")))

        if self.tasks is not None:
            self.tasks.create_task(change())

    def begin_adapter(self, command: LoadAdapter | UnloadAdapter, reply: str) -> None:
        async def change() -> None:
            if isinstance(command, LoadAdapter):
                refusal, done = await self._adapters.load(command.name, command.source), "serves"
            else:
                refusal, done = await self._adapters.unload(command.name, command.grace_s), "has unloaded"
            message = refusal or f"worker {self._session.worker} {done} {command.name!r}"
            self._session.reply(reply, encode(Done(ok=not refusal, message=message)))

        if self.tasks is not None:
            self.tasks.create_task(change())

    def inspect(self) -> Inspection:
        """What this worker holds, for operators and tests."""
        session = self._session
        states = session.prefill_server.states() if session.prefill_server is not None else {}
        for run in session.runs:
            states[run.state.value] = states.get(run.state.value, 0) + 1
        return Inspection(
            component=session.worker,
            runs=[run.ref for run in session.runs],
            states=states,
            lease_held=session.registered,
            draining=session.draining,
            kv=self._kv.state if self._kv is not None else "",
        )

    def ask_dump(self) -> str:
        """Publish the inventory of cached blocks. Returns why not, or nothing."""
        if self._kv is None:
            return f"worker {self._session.worker} publishes no cache events"
        return self._kv.ask_dump()
