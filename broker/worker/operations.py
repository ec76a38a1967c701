"""Carries out operators' commands that act on a worker's engine: health, sleep, pause, cache, profiler and log level.

What takes the worker out of service is done in one order: refuse if the engine cannot, announce, finish or hand over, and only
then touch the engine; and back: the engine first, the announcement last.  One command is carried out at a time, but for
questions for the health, which must be answered while another one hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker import metrics
from headrace.broker.codec import decode_worker_command
from headrace.broker.dead_letters import note_failure
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Done, Inspection, LoadAdapter, UnloadAdapter
from headrace.broker.messages.operator import (
    CheckHealth,
    Operated,
    Pause,
    Profile,
    ResetCache,
    Resume,
    SetLogLevel,
    Sleep,
    Wake,
    WorkerCommand,
)
from headrace.broker.prefill_server import PrefillServer
from headrace.broker.worker.drain import AdapterChanges, Drainer, RoleChange, Withdrawal
from headrace.broker.worker.state import EngineOperations, KvPort, WorkerState, note_command, reply
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Message
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()


class WorkerOperations:
    """The operators' commands of one worker. Each returns its answer, and raises no HeadraceError."""

    def __init__(self, deps: WorkerDeps, state: WorkerState, withdrawal: Withdrawal, engine: EngineOperations | None) -> None:
        """A sleep without a grace period gets that of a drain. Without `engine` every command is refused."""
        self._state = state
        self._withdrawal = withdrawal
        self._engine = engine
        self._drain_grace_s = deps.settings.drain_grace_s
        self._one = asyncio.Lock()
        self._handlers: dict[type[Any], Callable[[Any, EngineOperations], Awaitable[Operated]]] = {
            Sleep: self._sleep,
            Wake: self._wake,
            Pause: self._pause,
            Resume: self._resume,
            ResetCache: self._reset_cache,
            Profile: self._profile,
            SetLogLevel: self._set_log_level,
        }

    async def do(self, command: WorkerCommand) -> Operated:
        """Carry out a command. What the engine cannot do is refused before anything is changed."""
        name = type(command).__struct_config__.tag
        if self._engine is None:
            return Operated(ok=False, message=f"worker {self._state.worker} has no engine that can be operated")
        try:
            if isinstance(command, CheckHealth):
                return await self._health(command, self._engine)
            async with self._one:
                log.info("worker.operating", worker=self._state.worker, command=name)
                answer = await self._handlers[type(command)](command, self._engine)
        except HeadraceError as error:
            answer = Operated(ok=False, message=str(error))
        log.info("worker.operated", worker=self._state.worker, command=name, refused=None if answer.ok else answer.message)
        return answer

    async def _health(self, command: CheckHealth, engine: EngineOperations) -> Operated:
        state = self._state
        canary = command.canary and not state.withdrawn  # an engine that is withdrawn stands still, or is about to change
        healthy, report = await engine.health(canary=canary, timeout_s=command.timeout_s)
        report = {**report, "state": "draining" if state.draining else state.withdrawn or "serving"}
        return Operated(ok=healthy, message=f"worker {state.worker} is {'healthy' if healthy else 'unhealthy'}", report=report)

    async def _sleep(self, command: Sleep, engine: EngineOperations) -> Operated:
        state = self._state
        if state.member.sleeping == command.level:
            return Operated(message=f"worker {state.worker} sleeps already", report={"level": command.level})
        if refusal := self._withdrawal.refusal:
            return Operated(ok=False, message=refusal)
        engine.check("sleep", level=command.level)
        await self._withdrawal.begin("sleep")
        try:
            await self._withdrawal.empty(self._drain_grace_s if command.grace_s is None else command.grace_s)
            report = await engine.sleep(command.level)
        except HeadraceError:
            await self._return()
            raise
        await self._withdrawal.announce(sleeping=command.level)
        return Operated(message=f"worker {state.worker} sleeps", report=report)

    async def _wake(self, command: Wake, engine: EngineOperations) -> Operated:
        state = self._state
        if not state.member.sleeping:
            return Operated(message=f"worker {state.worker} is awake already")
        if state.draining:
            return Operated(ok=False, message=self._withdrawal.refusal)
        level = state.member.sleeping
        await self._withdrawal.announce(waking=True)
        try:
            report = await engine.wake(level)
        except HeadraceError:
            await self._withdrawal.announce(waking=False)
            raise
        await self._return(sleeping=0, waking=False)
        return Operated(message=f"worker {state.worker} is awake", report=report)

    async def _pause(self, command: Pause, engine: EngineOperations) -> Operated:
        state = self._state
        if state.member.paused:
            return Operated(message=f"worker {state.worker} is paused already")
        if refusal := self._withdrawal.refusal:
            return Operated(ok=False, message=refusal)
        engine.check("pause")
        await self._withdrawal.begin("pause")
        try:
            if command.grace_s is None:
                await self._withdrawal.leave_prefills(0.0)  # decode workers do not wait for the end of a pause
            else:
                await self._withdrawal.empty(command.grace_s)
            report = await engine.pause()
        except HeadraceError:
            await self._return()
            raise
        await self._withdrawal.announce(paused=True)
        return Operated(message=f"worker {state.worker} is paused", report={**report, "held": len(state.runs)})

    async def _resume(self, command: Resume, engine: EngineOperations) -> Operated:
        state = self._state
        if not state.member.paused:
            return Operated(message=f"worker {state.worker} is not paused")
        report = await engine.resume()
        await self._return(paused=False)
        return Operated(message=f"worker {state.worker} goes on", report=report)

    async def _return(self, **changes: Any) -> None:
        try:
            await self._withdrawal.announce(draining=False, **changes)
        finally:
            self._withdrawal.end()

    async def _reset_cache(self, command: ResetCache, engine: EngineOperations) -> Operated:
        engine.check("reset_cache")
        report = await engine.reset_cache()
        return Operated(message=f"the prefix cache of worker {self._state.worker} is empty", report=report)

    async def _profile(self, command: Profile, engine: EngineOperations) -> Operated:
        engine.check("profile")
        report = await engine.profile(command.action)
        did = "is profiled" if command.action == "start" else "is not profiled any more"
        return Operated(message=f"worker {self._state.worker} {did}", report=report)

    async def _set_log_level(self, command: SetLogLevel, engine: EngineOperations) -> Operated:
        engine.set_log_level(command.level)
        return Operated(message=f"worker {self._state.worker} logs from level {command.level} on")


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
    def __init__(self, state: WorkerState, lease: LeaseKeeper, kv: KvPort | None, prefill: PrefillServer | None) -> None:
        self._state = state
        self._lease = lease
        self._kv = kv
        self._prefill = prefill

    def inspect(self) -> Inspection:
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
