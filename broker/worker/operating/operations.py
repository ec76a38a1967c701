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
from headrace.broker.messages import (
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
from headrace.broker.worker.operating.withdrawal import Withdrawal
from headrace.broker.worker.ports import EngineOperations
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps

log = structlog.get_logger()


class WorkerOperations:
    """The operators' commands of one worker. Each returns its answer and raises nothing that is Headrace's own."""

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
        """Announce that the worker serves again, and let it."""
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
