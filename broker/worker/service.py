"""The commands of operators to one worker: drain, change of role, sleep, pause, adapters, and a look at its engine.

What takes the worker out of service is done in one order: refuse if the engine cannot, announce, finish or hand over, and only
then touch the engine; and back: the engine first, the announcement last.  A worker that is withdrawn keeps its process, its
lease and its engine; meanwhile it is announced as draining, so routers and other workers pass it by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.dead_letters import note_failure
from headrace.broker.messages.control import Done, LoadAdapter, UnloadAdapter
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
from headrace.broker.models.card_store import adapter_gone, adapter_served
from headrace.broker.models.cards import UNLOAD_GRACE_S, bad_adapter_name
from headrace.broker.prefill_server import PrefillServer
from headrace.broker.protocol.quarantine import ENGINE_DEATH, NAMED_DEATH
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.intake import Intake
from headrace.broker.worker.ports import AdapterPort, EngineOperations, EnginePorts
from headrace.broker.worker.presence import Presence, Reason
from headrace.broker.worker.runs import WorkerRuns
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.tasks import TaskScope

POLL_S = 0.05
QUIET_S = 1.0  # after so long without a run on an adapter no request that was accepted for it is left

log = structlog.get_logger()


class Service:
    """The ways of one worker out of service and back. `done` is set when nothing is left but to release the lease.

    One command on the engine is carried out at a time, but for questions for its health, which must be answered while another
    one hangs.
    """

    def __init__(
        self,
        deps: WorkerDeps,
        presence: Presence,
        runs: WorkerRuns,
        intake: Intake,
        engine: EnginePorts,
        prefill: PrefillServer | None,
        tasks: TaskScope,
    ) -> None:
        """Commands begin in `tasks`, once that is open. One without a grace period gets that of a drain."""
        self._grace_s = deps.settings.drain_grace_s
        self._presence = presence
        self._runs = runs
        self._intake = intake
        self._engine = engine.operations
        self._set_role = engine.set_role
        self._prefill = prefill
        self._tasks = tasks
        self._adapters = Adapters(deps, presence, runs, engine.adapters)
        self._one = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self.done = asyncio.Event()

    # -- for good ------------------------------------------------------------------------------------------------

    async def drain(self, grace_s: float) -> None:
        """Finish what runs within the grace period, and hand the rest over. A second call waits for the first."""
        presence = self._presence
        if presence.draining:
            await self.done.wait()
            return
        log.info("worker.draining", worker=presence.worker, runs=len(self._runs.table), grace_s=grace_s)
        await self._leave()
        deadline = self._loop.time() + grace_s
        await self._move_unstarted("drain")
        await self._wait(deadline)
        await self._hand_over(reason="drain")
        await self._leave_prefills(max(0.0, deadline - self._loop.time()))
        self.done.set()

    async def engine_died(self, why: str, named: Collection[str] = ()) -> None:
        """Move all runs, as their worker can do itself. Those that were in the engine have crashed.

        `named`: the requests that the engine has named as the cause; then only these have.
        """
        table, worker = self._runs.table, self._presence.worker
        self._runs.engine_dead = True
        log.error("engine.died", worker=worker, why=why, runs=len(table), named=sorted(named))
        in_engine = {run for run in table if run.in_engine}
        blamed = {run for run in in_engine if run.id in named} or in_engine
        suffix = NAMED_DEATH if blamed and all(run.id in named for run in blamed) else ENGINE_DEATH
        await self._leave()
        await self._hand_over(reason="engine_died", suspect=f"{worker}{suffix}", blamed=blamed)
        if self._prefill is not None:
            self._prefill.fail_all(f"its engine is dead: {why}")
            await self._prefill.leave(0.0)
        self.done.set()

    async def _leave(self) -> None:
        self._presence.leave()
        await self._intake.stop()
        await self._presence.announce_drain()

    async def _hand_over(self, *, reason: str, suspect: str | None = None, blamed: Collection[Run] = ()) -> None:
        for run in self._runs.table:
            found = suspect if run in blamed else None
            await self._runs.move(run, suspect=found, reason=reason, group=len(blamed) if found else 0)
        await self._presence.mover.move_all(self._presence.worker, died=False, reason=reason)

    async def _move_unstarted(self, reason: str) -> None:
        """Move stored work and runs that only wait: they need no grace period."""
        table = self._runs.table
        for run in table:
            if run.state is RunState.WAITING:
                await self._runs.move(run, suspect=None, reason=reason)
        held = {run.seq for run in table}
        await self._presence.mover.move_all(self._presence.worker, died=False, reason=reason, keep=held)

    async def _wait(self, deadline: float) -> None:
        while len(self._runs.table) and self._loop.time() < deadline:
            await asyncio.sleep(POLL_S)

    async def _leave_prefills(self, grace_s: float) -> None:
        if self._prefill is not None:
            await self._prefill.leave(grace_s)

    # -- for a while ---------------------------------------------------------------------------------------------

    async def _withdraw(self, reason: Reason, grace_s: float | None) -> None:
        """Finish within the grace period, and hand the rest over. None: the runs stay where they are."""
        presence = self._presence
        presence.withdraw(reason)
        await presence.announce(draining=True)
        presence.changed()
        await self._move_unstarted(reason)
        if grace_s is None:
            await self._leave_prefills(0.0)  # decode workers do not wait for the end of a pause
        else:
            await self._empty(reason, grace_s)

    async def _empty(self, reason: Reason, grace_s: float) -> None:
        """Wait for the runs within the grace period, then move the rest. Jobs for other workers end likewise."""
        deadline = self._loop.time() + grace_s
        await self._wait(deadline)
        for run in self._runs.table:
            await self._runs.move(run, suspect=None, reason=reason)
        await self._leave_prefills(max(0.0, deadline - self._loop.time()))

    async def _return(self, **changes: Any) -> None:
        try:
            await self._presence.announce(draining=False, **changes)
        finally:
            self._presence.return_to_service()

    async def change_role(self, role: str, grace_s: float) -> str:
        """Serve in another role. Returns the reason if it does not, or nothing."""
        presence, member = self._presence, self._presence.member
        if presence.draining:
            return presence.refusal
        if presence.withdrawn == "role":
            return f"worker {member.worker} is changing its role already"
        if presence.withdrawn:
            return presence.refusal
        if role == member.role:
            return ""
        if self._set_role is None or role not in member.roles:
            can = ", ".join(sorted({*member.roles, member.role}))
            return f"worker {member.worker} cannot serve as {role!r}: its engine was started for {can}"
        log.info("worker.role_changing", worker=member.worker, before=member.role, after=role, grace_s=grace_s)
        refusal = ""
        try:
            await self._withdraw("role", grace_s)
            try:
                await self._set_role(role)
            except HeadraceError as error:
                refusal = str(error)
            await presence.announce(role=member.role if refusal else role, draining=False)
        finally:
            presence.return_to_service()
        log.info("worker.role_changed", worker=member.worker, role=presence.member.role, refused=refusal or None)
        return refusal

    # -- commands on the engine ----------------------------------------------------------------------------------

    async def operate(self, command: WorkerCommand) -> Operated:
        """Carry out a command. It raises no HeadraceError, and refuses before anything is changed if the engine cannot."""
        name, worker = type(command).__struct_config__.tag, self._presence.worker
        if self._engine is None:
            return Operated(ok=False, message=f"worker {worker} has no engine that can be operated")
        try:
            if isinstance(command, CheckHealth):
                return await self._health(command, self._engine)
            async with self._one:
                log.info("worker.operating", worker=worker, command=name)
                answer = await self._operate(command, self._engine)
        except HeadraceError as error:
            answer = Operated(ok=False, message=str(error))
        log.info("worker.operated", worker=worker, command=name, refused=None if answer.ok else answer.message)
        return answer

    async def _operate(self, command: WorkerCommand, engine: EngineOperations) -> Operated:
        worker = self._presence.worker
        if isinstance(command, Sleep):
            return await self._sleep(command, engine)
        if isinstance(command, Wake):
            return await self._wake(engine)
        if isinstance(command, Pause):
            return await self._pause(command, engine)
        if isinstance(command, Resume):
            return await self._resume(engine)
        if isinstance(command, ResetCache):
            engine.check("reset_cache")
            report = await engine.reset_cache()
            return Operated(message=f"the prefix cache of worker {worker} is empty", report=report)
        if isinstance(command, Profile):
            engine.check("profile")
            report = await engine.profile(command.action)
            did = "is profiled" if command.action == "start" else "is not profiled any more"
            return Operated(message=f"worker {worker} {did}", report=report)
        assert isinstance(command, SetLogLevel)  # noqa: S101  # the last one
        engine.set_log_level(command.level)
        return Operated(message=f"worker {worker} logs from level {command.level} on")

    async def _health(self, command: CheckHealth, engine: EngineOperations) -> Operated:
        presence = self._presence
        canary = command.canary and not presence.withdrawn  # an engine that is withdrawn stands still, or is about to change
        healthy, report = await engine.health(canary=canary, timeout_s=command.timeout_s)
        report = {**report, "state": "draining" if presence.draining else presence.withdrawn or "serving"}
        message = f"worker {presence.worker} is {'healthy' if healthy else 'unhealthy'}"
        return Operated(ok=healthy, message=message, report=report)

    async def _sleep(self, command: Sleep, engine: EngineOperations) -> Operated:
        presence = self._presence
        if presence.member.sleeping == command.level:
            return Operated(message=f"worker {presence.worker} sleeps already", report={"level": command.level})
        if refusal := presence.refusal:
            return Operated(ok=False, message=refusal)
        engine.check("sleep", level=command.level)
        try:
            await self._withdraw("sleep", self._grace_s if command.grace_s is None else command.grace_s)
            report = await engine.sleep(command.level)
        except HeadraceError:
            await self._return()
            raise
        await presence.announce(sleeping=command.level)
        return Operated(message=f"worker {presence.worker} sleeps", report=report)

    async def _wake(self, engine: EngineOperations) -> Operated:
        presence = self._presence
        level = presence.member.sleeping
        if not level:
            return Operated(message=f"worker {presence.worker} is awake already")
        if presence.draining:
            return Operated(ok=False, message=presence.refusal)
        await presence.announce(waking=True)
        try:
            report = await engine.wake(level, role=presence.member.role)
        except HeadraceError:
            await presence.announce(waking=False)
            raise
        await self._return(sleeping=0, waking=False)
        return Operated(message=f"worker {presence.worker} is awake", report=report)

    async def _pause(self, command: Pause, engine: EngineOperations) -> Operated:
        presence = self._presence
        if presence.member.paused:
            return Operated(message=f"worker {presence.worker} is paused already")
        if refusal := presence.refusal:
            return Operated(ok=False, message=refusal)
        engine.check("pause")
        try:
            await self._withdraw("pause", command.grace_s)
            report = await engine.pause()
        except HeadraceError:
            await self._return()
            raise
        await presence.announce(paused=True)
        return Operated(message=f"worker {presence.worker} is paused", report={**report, "held": len(self._runs.table)})

    async def _resume(self, engine: EngineOperations) -> Operated:
        presence = self._presence
        if not presence.member.paused:
            return Operated(message=f"worker {presence.worker} is not paused")
        report = await engine.resume()
        await self._return(paused=False)
        return Operated(message=f"worker {presence.worker} goes on", report=report)

    # -- commands that are begun -----------------------------------------------------------------------------------

    def begin_drain(self, grace_s: float | None = None) -> None:
        """Begin a drain, unless one was begun. The caller answers."""
        if self._tasks.is_open and not self._presence.draining:
            self._tasks.spawn(self.drain(self._grace_s if grace_s is None else grace_s))

    def begin_role(self, role: str, grace_s: float | None, answer: Callable[[Done], None]) -> None:
        """Begin a change of role: finish within the grace period, hand the rest over, and serve as `role`."""

        async def change() -> None:
            refusal = await self.change_role(role, self._grace_s if grace_s is None else grace_s)
            answer(Done(ok=not refusal, message=refusal or f"worker {self._presence.worker} serves as {role}"))

        if self._tasks.is_open:
            self._tasks.spawn(change())

    def begin_adapter(self, command: LoadAdapter | UnloadAdapter, answer: Callable[[Done], None]) -> None:
        async def change() -> None:
            if isinstance(command, LoadAdapter):
                refusal, did = await self._adapters.load(command.name, command.source), "serves"
            else:
                refusal, did = await self._adapters.unload(command.name, command.grace_s), "has unloaded"
            answer(Done(ok=not refusal, message=refusal or f"worker {self._presence.worker} {did} {command.name!r}"))

        def failed(error: Exception) -> None:
            note_failure("adapter", error)
            answer(Done(ok=False, message=f"adapter {command.name!r} was not changed: {type(error).__name__}"))

        if self._tasks.is_open:
            self._tasks.spawn_guarded(change(), failed)

    def begin(self, command: WorkerCommand, answer: Callable[[Operated], None]) -> None:
        async def operate() -> None:
            answer(await self.operate(command))

        if self._tasks.is_open:
            if not isinstance(command, CheckHealth):
                self._presence.note_command(command)
            self._tasks.spawn(operate())


class Adapters:
    """Loads and unloads the adapters of a running worker, and announces them.

    Only adapters that the engine has are announced: after a load, and no longer before an unload. So no request is sent here
    for an adapter that is not there yet or about to go. A request that was on its way all the same still finds the adapter
    until the engine lets go of it (`Presence.usable`), and goes on elsewhere from then on. The pool's card names the
    adapters, too: by it ingresses know one whose last worker has died (503, try again) from one that was unloaded everywhere
    (404).
    """

    def __init__(self, deps: WorkerDeps, presence: Presence, runs: WorkerRuns, port: AdapterPort | None) -> None:
        """Without a `port` of the engine the adapters are those of the start."""
        self._deps = deps
        self._presence = presence
        self._runs = runs
        self._port = port
        self._one = asyncio.Lock()

    async def load(self, name: str, source: str) -> str:
        """Load an adapter; fine when it is there from the same source. Returns the reason if it is not loaded, or nothing."""
        presence = self._presence
        if refusal := self._refusal(name):
            return refusal
        if name == presence.member.model:
            return f"{name!r} is the name of the model itself"
        async with self._one:
            assert self._port is not None  # noqa: S101  # or it was refused
            if name not in presence.member.adapters and (refusal := await self._make_room()):
                return refusal
            try:
                await self._port.load(name, source)
            except HeadraceError as error:
                log.warning("adapter.refused", worker=presence.worker, adapter=name, source=source, why=str(error))
                return str(error)
            presence.unloading.discard(name)
            self._runs.adapter_use.pop(name, None)
            self._runs.adapter_use[name] = None  # the one that was used last
            if name not in presence.member.adapters:
                await self._presence.announce_adapters([*presence.member.adapters, name])
            await self._change_card(name, served=True)
        log.info("adapter.loaded", worker=presence.worker, adapter=name, source=source)
        return ""

    async def unload(self, name: str, grace_s: float | None) -> str:
        """Unload an adapter. Its runs have `grace_s` to finish and are then handed over.

        Returns the reason if it is not unloaded, or nothing.
        """
        presence = self._presence
        if refusal := self._refusal(name):
            return refusal
        async with self._one:
            assert self._port is not None  # noqa: S101  # or it was refused
            if name not in presence.member.adapters:
                have = ", ".join(presence.member.adapters) or "none"
                return f"worker {presence.worker} has no adapter {name!r}; it has: {have}"
            return await self._unload(self._port, name, UNLOAD_GRACE_S if grace_s is None else grace_s)

    async def _unload(self, port: AdapterPort, name: str, grace_s: float) -> str:
        presence = self._presence
        presence.unloading.add(name)
        await self._presence.announce_adapters([other for other in presence.member.adapters if other != name])
        await self._change_card(name, served=False)
        await self._finish(name, grace_s)
        presence.unloading.discard(name)
        self._runs.adapter_use.pop(name, None)
        try:
            await port.unload(name)
        except HeadraceError as error:
            log.warning("adapter.not_freed", worker=presence.worker, adapter=name, why=str(error))
            return f"{name!r} is not served any more, but the engine keeps it: {error}"
        log.info("adapter.unloaded", worker=presence.worker, adapter=name)
        return ""

    async def _make_room(self) -> str:
        """Unload the adapter that was used least recently if there is no slot for one more.

        Returns the reason if there is no room, or nothing. Adapters of the worker's start and those with runs stay.
        """
        presence, most = self._presence, self._deps.settings.adapter_slots
        if len(presence.member.adapters) < most:
            return ""
        assert self._port is not None  # noqa: S101  # or the load was refused
        busy = {run.envelope.adapter for run in self._runs.table}
        for name in tuple(self._runs.adapter_use):
            if name not in busy:
                log.info("adapter.makes_room", worker=presence.worker, adapter=name, slots=most)
                return await self._unload(self._port, name, UNLOAD_GRACE_S)
        return f"worker {presence.worker} has {most} adapters (adapter_slots), all of its start or in use; unload one first"

    def _refusal(self, name: str) -> str:
        if self._presence.draining:
            return f"worker {self._presence.worker} is draining"
        if self._presence.withdrawn in ("sleep", "pause"):
            return f"the engine of worker {self._presence.worker} stands still: wake or resume it first"
        if self._port is None:
            return f"worker {self._presence.worker} cannot change its adapters while it runs"
        return bad_adapter_name(name)

    async def _change_card(self, name: str, *, served: bool) -> None:
        change = adapter_served if served else adapter_gone
        deps, presence = self._deps, self._presence
        await presence.until_done(lambda: change(deps.messaging, deps.subjects, presence.pool, name), event="adapter.retry")

    async def _finish(self, name: str, grace_s: float) -> None:
        """Wait until no run is left on the adapter, then move what the grace period left over.

        A request that was accepted before may still be on its way from the queue, so the end is only a quiet time without any.
        """
        runs = self._runs.table
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        seen_s = loop.time()
        while loop.time() < min(deadline, seen_s + QUIET_S):
            if any(run.envelope.adapter == name for run in runs):
                seen_s = loop.time()
            await asyncio.sleep(POLL_S)
        for run in [run for run in runs if run.envelope.adapter == name]:
            await self._runs.move(run, suspect=None, reason="adapter")
