"""Loads and unloads the adapters of a running worker, and announces them.

Only adapters that the engine has are announced: after a load, and no longer before an unload.  So no request is sent here for
an adapter that is not there yet or about to go.  A request that was on its way all the same still finds the adapter until the
engine lets go of it (`WorkerState.usable`), and goes on elsewhere from then on.  The pool's card names the adapters, too: by it
ingresses know one whose last worker has died (503, try again) from one that was unloaded everywhere (404).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.codec import encode
from headrace.broker.models.card_store import adapter_gone, adapter_served
from headrace.broker.models.cards import UNLOAD_GRACE_S, bad_adapter_name
from headrace.broker.retry import until_done
from headrace.broker.worker.ports import AdapterPort
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper

log = structlog.get_logger()

POLL_S = 0.05
QUIET_S = 1.0  # after so long without a run on an adapter no request that was accepted for it is left


class AdapterChanges:
    """Changes the adapters of one worker, one change at a time."""

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
