"""Drain, withdrawal and engine death of a worker, and its changes of role and adapters.

Drains are announced first, then runs finish or are handed over, and only then the lease is released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Literal

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.codec import encode
from headrace.broker.dead_letters import until_done
from headrace.broker.membership.members import drained_key
from headrace.broker.membership.mover import Mover
from headrace.broker.models.card_store import adapter_gone, adapter_served
from headrace.broker.models.cards import UNLOAD_GRACE_S, bad_adapter_name
from headrace.broker.prefill_server import PrefillServer
from headrace.broker.protocol.quarantine import ENGINE_DEATH, NAMED_DEATH
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.runs import RunLifecycle
from headrace.broker.worker.state import AdapterPort, WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper

POLL_S = 0.05


class Evacuation:
    """The common steps of a drain and a withdrawal: stored work moves at once, runs after a grace period."""

    def __init__(self, state: WorkerState, mover: Mover, runs: RunLifecycle, prefill: PrefillServer | None) -> None:
        self._state = state
        self._mover = mover
        self._runs = runs
        self._prefill = prefill

    async def move_unstarted(self, reason: str) -> None:
        state = self._state
        for run in state.runs:
            if run.state is RunState.WAITING:
                await self._runs.move(run, suspect=None, reason=reason)
        held = {run.seq for run in state.runs}
        await self._mover.move_all(state.worker, died=False, reason=reason, keep=held)

    async def wait(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while len(self._state.runs) and loop.time() < deadline:
            await asyncio.sleep(POLL_S)

    async def leave_prefills(self, grace_s: float) -> None:
        if self._prefill is not None:
            await self._prefill.leave(grace_s)


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


# Takes a worker out of service while its process, its lease and its engine stay, and puts it back.
#
# Meanwhile it is announced as draining, so routers and other workers pass it by. What it could not finish within the grace
# period goes on elsewhere, as in a drain. A change of role, a sleep and a pause are done between the two.

Reason = Literal["role", "sleep", "pause"]
_STANDS = {"role": "is changing its role", "sleep": "sleeps: wake it first", "pause": "is paused: resume it first"}


class Withdrawal:
    """Withdraws one worker, for one reason at a time (`WorkerState.withdrawn`)."""

    def __init__(
        self, deps: WorkerDeps, state: WorkerState, lease: LeaseKeeper, runs: RunLifecycle, evacuation: Evacuation
    ) -> None:
        self._retry_s = deps.timing.retry_s
        self._state = state
        self._lease = lease
        self._runs = runs
        self._evacuation = evacuation

    async def begin(self, reason: Reason) -> None:
        self._state.withdrawn = reason
        await self.announce(draining=True)
        self._state.changed()
        await self._evacuation.move_unstarted(reason)

    async def empty(self, grace_s: float) -> None:
        """Wait for the runs within the grace period, then move the rest. Jobs for other workers end likewise."""
        state = self._state
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        await self._evacuation.wait(deadline)
        for run in state.runs:
            await self._runs.move(run, suspect=None, reason=state.withdrawn)
        await self.leave_prefills(max(0.0, deadline - loop.time()))

    async def leave_prefills(self, grace_s: float) -> None:
        await self._evacuation.leave_prefills(grace_s)

    async def announce(self, **changes: Any) -> None:
        """Change fields of the lease's value and publish it. A drain that begins meanwhile announces itself."""
        state = self._state
        if state.draining:
            changes.pop("draining", None)
        state.update_member(**changes)
        await until_done(
            lambda: self._lease.update(encode(state.member)),
            event=f"{state.withdrawn or 'worker'}.retry",
            retry_s=self._retry_s,
            wanted=lambda: not state.draining,
            worker=state.worker,
        )

    def end(self) -> None:
        """Take work again. The caller has announced it already; after an error the lease may differ."""
        self._state.withdrawn = ""
        self._state.changed()

    @property
    def refusal(self) -> str:
        """Return why nothing else can be done with this worker now, or an empty string."""
        worker, why = self._state.worker, self._state.withdrawn
        if self._state.draining:
            return f"worker {worker} is draining"
        return f"worker {worker} {_STANDS[why]}" if why else ""


# Change of a worker's role: withdraw it, finish or hand over the runs, have the engine change, and serve again.
#
# Unlike a worker that leaves, it keeps its lease, its engine and its cache.


class RoleChange:
    def __init__(
        self, state: WorkerState, withdrawal: Withdrawal, *, set_role: Callable[[str], Awaitable[None]] | None
    ) -> None:
        self._state = state
        self._withdrawal = withdrawal
        self._set_role = set_role

    async def change(self, role: str, grace_s: float) -> str:
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


# Loads and unloads the adapters of a running worker, and announces them.
#
# Only adapters that the engine has are announced: after a load, and no longer before an unload. So no request is sent here
# for an adapter that is not there yet or about to go. A request that was on its way all the same still finds the adapter
# until the engine lets go of it (`WorkerState.usable`), and goes on elsewhere from then on. The pool's card names the
# adapters, too: by it ingresses know one whose last worker has died (503, try again) from one that was unloaded everywhere
# (404).

QUIET_S = 1.0  # after so long without a run on an adapter no request that was accepted for it is left


class AdapterChanges:
    def __init__(
        self, deps: WorkerDeps, state: WorkerState, lease: LeaseKeeper, runs: RunLifecycle, port: AdapterPort | None
    ) -> None:
        """Take the engine's `port`. Without one the adapters are those of the start."""
        self._deps = deps
        self._state = state
        self._lease = lease
        self._runs = runs
        self._port = port
        self._one = asyncio.Lock()

    async def load(self, name: str, source: str) -> str:
        """Load an adapter; fine when it is there from the same source. Returns the reason if it is not loaded, or nothing."""
        state = self._state
        if refusal := self._refusal(name):
            return refusal
        if name == state.member.model:
            return f"{name!r} is the name of the model itself"
        async with self._one:
            assert self._port is not None  # noqa: S101  # or it was refused
            if name not in state.member.adapters and (refusal := await self._make_room()):
                return refusal
            try:
                await self._port.load(name, source)
            except HeadraceError as error:
                log.warning("adapter.refused", worker=state.worker, adapter=name, source=source, why=str(error))
                return str(error)
            state.unloading.discard(name)
            state.adapters_used.loaded(name)
            if name not in state.member.adapters:
                await self._announce([*state.member.adapters, name])
            await self._change_card(name, served=True)
        log.info("adapter.loaded", worker=state.worker, adapter=name, source=source)
        return ""

    async def unload(self, name: str, grace_s: float | None) -> str:
        """Unload an adapter. Its runs have `grace_s` to finish and are then handed over.

        Returns the reason if it is not unloaded, or nothing.
        """
        state = self._state
        if refusal := self._refusal(name):
            return refusal
        async with self._one:
            assert self._port is not None  # noqa: S101  # or it was refused
            if name not in state.member.adapters:
                have = ", ".join(state.member.adapters) or "none"
                return f"worker {state.worker} has no adapter {name!r}; it has: {have}"
            return await self._unload(self._port, name, UNLOAD_GRACE_S if grace_s is None else grace_s)

    async def _unload(self, port: AdapterPort, name: str, grace_s: float) -> str:
        state = self._state
        state.unloading.add(name)
        await self._announce([other for other in state.member.adapters if other != name])
        await self._change_card(name, served=False)
        await self._finish(name, grace_s)
        state.unloading.discard(name)
        state.adapters_used.unloaded(name)
        try:
            await port.unload(name)
        except HeadraceError as error:
            log.warning("adapter.not_freed", worker=state.worker, adapter=name, why=str(error))
            return f"{name!r} is not served any more, but the engine keeps it: {error}"
        log.info("adapter.unloaded", worker=state.worker, adapter=name)
        return ""

    async def _make_room(self) -> str:
        """Unload the adapter that was used least recently if there is no slot for one more.

        Returns the reason if there is no room, or nothing. Adapters of the worker's start and those with runs stay.
        """
        state, most = self._state, self._deps.settings.adapter_slots
        if len(state.member.adapters) < most:
            return ""
        assert self._port is not None  # noqa: S101  # or the load was refused
        busy = {run.envelope.adapter for run in state.runs}
        for name in state.adapters_used.least_recent_first():
            if name not in busy:
                log.info("adapter.makes_room", worker=state.worker, adapter=name, slots=most)
                return await self._unload(self._port, name, UNLOAD_GRACE_S)
        return f"worker {state.worker} has {most} adapters (adapter_slots), all of its start or in use; unload one first"

    def _refusal(self, name: str) -> str:
        if self._state.draining:
            return f"worker {self._state.worker} is draining"
        if self._state.withdrawn in ("sleep", "pause"):
            return f"the engine of worker {self._state.worker} stands still: wake or resume it first"
        if self._port is None:
            return f"worker {self._state.worker} cannot change its adapters while it runs"
        return bad_adapter_name(name)

    async def _announce(self, adapters: list[str]) -> None:
        self._state.update_member(adapters=adapters)
        await self._until_done(lambda: self._lease.update(encode(self._state.member)))

    async def _change_card(self, name: str, *, served: bool) -> None:
        change = adapter_served if served else adapter_gone
        await self._until_done(lambda: change(self._deps.messaging, self._deps.subjects, self._state.pool, name))

    async def _until_done(self, attempt: Callable[[], Awaitable[object]]) -> None:
        await until_done(
            attempt,
            event="adapter.retry",
            retry_s=self._deps.timing.retry_s,
            wanted=lambda: not self._state.draining,  # a drain that begins meanwhile announces itself
            worker=self._state.worker,
        )

    async def _finish(self, name: str, grace_s: float) -> None:
        """Wait until no run is left on the adapter, then move what the grace period left over.

        A request that was accepted before may still be on its way from the queue, so the end is only a quiet time without any.
        """
        runs = self._state.runs
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        seen_s = loop.time()
        while loop.time() < min(deadline, seen_s + QUIET_S):
            if any(run.envelope.adapter == name for run in runs):
                seen_s = loop.time()
            await asyncio.sleep(POLL_S)
        for run in [run for run in runs if run.envelope.adapter == name]:
            await self._runs.move(run, suspect=None, reason="adapter")
