"""Adapters of a running worker: loaded, announced, and unloaded once what runs on them has finished.

What is announced, the engine has: it is announced after a load, and no more before an unload.  So nobody is sent here for
an adapter that is not there yet or about to go; what was on its way all the same still finds it (`usable`) until the engine
lets go of it, and goes on elsewhere from then on.  The pool's card names the adapters, too, so that ingresses know one whose
last worker has died (503, try again) from one that was unloaded everywhere (404).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
import structlog

from headrace.broker.codec import encode
from headrace.broker.models.card_store import adapter_gone, adapter_served
from headrace.broker.models.cards import UNLOAD_GRACE_S, bad_adapter_name
from headrace.broker.retry import until_done
from headrace.broker.settings import Timing
from headrace.broker.worker.ports import AdapterPort
from headrace.jetstream.errors import HeadraceError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

if TYPE_CHECKING:
    from headrace.broker.worker.session import WorkerSession

log = structlog.get_logger()

POLL_S = 0.05
QUIET_S = 1.0  # without a run on an adapter: nothing that was accepted for it waits any more
MOST_ADAPTERS = 256  # of one worker: their names travel with every renewal of its lease


class AdapterChanges:
    """Loading and unloading in one worker session, one at a time."""

    def __init__(
        self,
        session: WorkerSession,
        messaging: Messaging,
        subjects: Subjects,
        lease: LeaseKeeper,
        port: AdapterPort | None,
        *,
        timing: Timing,
    ) -> None:
        """Without `port` the adapters are those of the start."""
        self._session = session
        self._messaging = messaging
        self._subjects = subjects
        self._lease = lease
        self._port = port
        self._timing = timing
        self._one = asyncio.Lock()
        self._leaving: set[str] = set()  # not announced any more, but still in the engine

    def usable(self, name: str) -> bool:
        """The engine has it, or none is needed."""
        return not name or name in self._session.member.adapters or name in self._leaving

    async def load(self, name: str, source: str) -> str:
        """Returns why it is not loaded, or nothing. One that is there from the same source is fine."""
        member = self._session.member
        if refusal := self._refusal(name):
            return refusal
        if name == member.model:
            return f"{name!r} is the name of the model itself"
        async with self._one:
            assert self._port is not None  # noqa: S101  # or it was refused
            if name not in self._session.member.adapters and len(self._session.member.adapters) >= MOST_ADAPTERS:
                return f"worker {member.worker} has {MOST_ADAPTERS} adapters already; unload one first"
            try:
                await self._port.load(name, source)
            except HeadraceError as error:
                log.warning("adapter.refused", worker=member.worker, adapter=name, source=source, why=str(error))
                return str(error)
            self._leaving.discard(name)
            if name not in self._session.member.adapters:
                await self._announce([*self._session.member.adapters, name])
            await self._tell_card(name, served=True)
        log.info("adapter.loaded", worker=member.worker, adapter=name, source=source)
        return ""

    async def unload(self, name: str, grace_s: float | None) -> str:
        """Returns why it is not unloaded, or nothing. What runs on it has `grace_s` to finish and is then handed over."""
        member = self._session.member
        if refusal := self._refusal(name):
            return refusal
        async with self._one:
            assert self._port is not None  # noqa: S101  # or it was refused
            if name not in self._session.member.adapters:
                have = ", ".join(self._session.member.adapters) or "none"
                return f"worker {member.worker} has no adapter {name!r}; it has: {have}"
            self._leaving.add(name)
            await self._announce([other for other in self._session.member.adapters if other != name])
            await self._tell_card(name, served=False)
            await self._finish(name, UNLOAD_GRACE_S if grace_s is None else grace_s)
            self._leaving.discard(name)
            try:
                await self._port.unload(name)
            except HeadraceError as error:
                log.warning("adapter.not_freed", worker=member.worker, adapter=name, why=str(error))
                return f"{name!r} is not served any more, but the engine keeps it: {error}"
        log.info("adapter.unloaded", worker=member.worker, adapter=name)
        return ""

    def _refusal(self, name: str) -> str:
        session = self._session
        if session.draining:
            return f"worker {session.worker} is draining"
        if self._port is None:
            return f"worker {session.worker} cannot change its adapters while it runs"
        return bad_adapter_name(name)

    async def _announce(self, adapters: list[str]) -> None:
        session = self._session
        session.member = msgspec.structs.replace(session.member, adapters=adapters)
        await self._until_done(lambda: self._lease.update(encode(session.member)))

    async def _tell_card(self, name: str, *, served: bool) -> None:
        tell = adapter_served if served else adapter_gone
        await self._until_done(lambda: tell(self._messaging, self._subjects, self._session.pool, name))

    async def _until_done(self, attempt: Callable[[], Awaitable[object]]) -> None:
        session = self._session
        await until_done(
            attempt,
            event="adapter.retry",
            retry_s=self._timing.retry_s,
            wanted=lambda: not session.draining,  # who leaves meanwhile announces that
            worker=session.worker,
        )

    async def _finish(self, name: str, grace_s: float) -> None:
        """No run on it is left afterwards.

        What was accepted before may still be on its way from the queue, so it is over only when nothing has come for a while.
        """
        session = self._session
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        seen_s = loop.time()
        while loop.time() < min(deadline, seen_s + QUIET_S):
            if any(run.envelope.adapter == name for run in session.runs):
                seen_s = loop.time()
            await asyncio.sleep(POLL_S)
        for run in [run for run in session.runs if run.envelope.adapter == name]:
            await session.move(run, suspect=None, reason="adapter")
