"""Operator commands to a worker: drain, change of role and adapter changes in the background, inspection at once."""

from __future__ import annotations

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode_worker_command
from headrace.broker.errors import WireError
from headrace.broker.failed_deliveries import note_failure
from headrace.broker.messages import CheckHealth, Done, Inspection, LoadAdapter, Operated, UnloadAdapter, WorkerCommand
from headrace.broker.prefill.server import PrefillServer
from headrace.broker.worker.operating.adapters import AdapterChanges
from headrace.broker.worker.operating.command_audit import note_command
from headrace.broker.worker.operating.drain import Drainer
from headrace.broker.worker.operating.operations import WorkerOperations
from headrace.broker.worker.operating.role_change import RoleChange
from headrace.broker.worker.ports import KvPort
from headrace.broker.worker.reply import reply
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Message
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()


class OperatorCommands:
    """Begins the commands of one worker in `tasks`, once that is open. Each answers on its reply subject when it is through."""

    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        drainer: Drainer,
        role_change: RoleChange,
        adapters: AdapterChanges,
        tasks: TaskScope,
    ) -> None:
        """A command without a grace period gets that of the settings."""
        self._messaging = deps.messaging
        self._drain_grace_s = deps.settings.drain_grace_s
        self._state = state
        self._drainer = drainer
        self._role_change = role_change
        self._adapters = adapters
        self._tasks = tasks

    def begin_drain(self, grace_s: float | None) -> None:
        """Begin a drain, unless one was begun. The caller answers."""
        if self._tasks.is_open and not self._state.draining:
            self._tasks.spawn(self._drainer.drain(self._drain_grace_s if grace_s is None else grace_s))

    def begin_role(self, role: str, grace_s: float | None, reply_to: str) -> None:
        """Begin a change of role: finish within the grace period, hand the rest over, and serve as `role`."""
        if self._tasks.is_open:
            self._tasks.spawn(self._change_role(role, self._drain_grace_s if grace_s is None else grace_s, reply_to))

    async def _change_role(self, role: str, grace_s: float, reply_to: str) -> None:
        worker = self._state.worker
        if self._state.draining:
            refusal = f"worker {worker} is draining"
        else:
            refusal = await self._role_change.change(role, grace_s)
        reply(self._messaging, reply_to, Done(ok=not refusal, message=refusal or f"worker {worker} serves as {role}"))

    def begin_adapter(self, command: LoadAdapter | UnloadAdapter, reply_to: str) -> None:
        """Begin to load or unload an adapter."""
        if self._tasks.is_open:
            self._tasks.spawn_guarded(
                self._change_adapter(command, reply_to), lambda error: self._not_changed(command, error, reply_to)
            )

    def _not_changed(self, command: LoadAdapter | UnloadAdapter, error: Exception, reply_to: str) -> None:
        note_failure("adapter", error)
        message = f"adapter {command.name!r} was not changed: {type(error).__name__}"
        reply(self._messaging, reply_to, Done(ok=False, message=message))

    async def _change_adapter(self, command: LoadAdapter | UnloadAdapter, reply_to: str) -> None:
        if isinstance(command, LoadAdapter):
            refusal, done = await self._adapters.load(command.name, command.source), "serves"
        else:
            refusal, done = await self._adapters.unload(command.name, command.grace_s), "has unloaded"
        message = refusal or f"worker {self._state.worker} {done} {command.name!r}"
        reply(self._messaging, reply_to, Done(ok=not refusal, message=message))


class AdminInbox:
    """Takes operators' commands from a worker's own subject for them, and begins each in `tasks`, once that is open."""

    def __init__(self, deps: WorkerDeps, state: WorkerState, operations: WorkerOperations, tasks: TaskScope) -> None:
        self._messaging = deps.messaging
        self._state = state
        self._operations = operations
        self._tasks = tasks

    def on_command(self, message: Message) -> None:
        """Begin one command. An undecodable one is counted, logged and refused."""
        try:
            command = decode_worker_command(message.data)
        except WireError as error:
            metrics.MALFORMED.labels("command").inc()
            log.error("command.malformed", error=str(error))
            reply(self._messaging, message.reply, Operated(ok=False, message=str(error)))
            return
        if self._tasks.is_open:
            if not isinstance(command, CheckHealth):
                note_command(self._state, command)
            self._tasks.spawn(self._do(command, message.reply))

    async def _do(self, command: WorkerCommand, reply_to: str) -> None:
        reply(self._messaging, reply_to, await self._operations.do(command))


class Inspector:
    """Answers operators' and tests' questions about one worker."""

    def __init__(self, state: WorkerState, lease: LeaseKeeper, kv: KvPort | None, prefill: PrefillServer | None) -> None:
        self._state = state
        self._lease = lease
        self._kv = kv
        self._prefill = prefill

    def inspect(self) -> Inspection:
        """List the runs and count runs and prefill jobs by state."""
        state = self._state
        states = self._prefill.states() if self._prefill is not None else {}
        for run in state.runs:
            states[run.state.value] = states.get(run.state.value, 0) + 1
        return Inspection(
            component=state.worker,
            runs=[run.ref for run in state.runs],
            states=states,
            lease_held=self._lease.held,
            draining=state.draining,
            kv=self._kv.state if self._kv is not None else "",
        )

    def ask_dump(self) -> str:
        """Publish the inventory of cached blocks. Returns the reason if it cannot, or nothing."""
        if self._kv is None:
            return f"worker {self._state.worker} publishes no cache events"
        return self._kv.ask_dump()
