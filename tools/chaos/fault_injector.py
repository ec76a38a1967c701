"""Injects the drawn faults and ends them: kills, freezes, drains, partitions, and interruptions of the NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import structlog

from headrace.base.errors import StartFailed
from headrace.broker.errors import WireError
from headrace.broker.messages import Inspect, Inspection
from headrace.commands.operating.control import live_workers
from headrace.commands.operating.control_client import ask_all
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.deployment import ChaosDeployment, Process
from headrace.tools.chaos.duplicate_publishes import publish_duplicates
from headrace.tools.chaos.ledger import Injury, Ledger
from headrace.tools.chaos.quiescence import until_well
from headrace.tools.chaos.schedule import PlannedFault

_log = structlog.get_logger()

_WELL_TIMEOUT_S = 60.0
_DRAIN_TIMEOUT_S = 30.0
_ASK_TIMEOUT_S = 3.0
_POLL_S = 0.1
_LATE_S = 1.2  # Each way: a reply arrives when more than half of a lease is over.
_STOPS_S, _RUNS_S = 0.25, 0.05


class FaultInjector:
    """Injects the faults in order and records them in the ledger. `troubles` describes each one that did not mend."""

    def __init__(
        self,
        deployment: ChaosDeployment,
        ledger: Ledger,
        connection: Connection,
        names: Subjects,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._deployment = deployment
        self._ledger = ledger
        self._connection = connection
        self._names = names
        self._clock = clock
        self._nats_hurt = False
        self.troubles: list[str] = []

    async def run(self, faults: Iterator[PlannedFault], *, until_s: float) -> None:
        """Inject no fault after `until_s` (of the clock). Returns once the last one is mended and the deployment is well."""
        async with asyncio.TaskGroup() as mending:
            for fault in faults:
                await asyncio.sleep(min(fault.gap_s, max(0.0, until_s - self._clock())))
                if fault.settled:
                    await self._until_well(f"before {fault.kind}")
                if self._clock() >= until_s:
                    break
                victims = self._victims(fault)
                if victims is not None:
                    mending.create_task(self._injure(fault, victims))
        await self._until_well("at the end")

    async def _until_well(self, when: str) -> None:
        if not await until_well(self._deployment, self._connection, self._names, timeout_s=_WELL_TIMEOUT_S):
            self.troubles.append(f"not well again within {_WELL_TIMEOUT_S:g} s {when}")

    def _victims(self, fault: PlannedFault) -> list[Process] | None:
        """Choose the processes to hit. Returns None if none can be hit now. One serving worker is always left alone."""
        if fault.part == "nats":
            return None if self._nats_hurt else []
        if fault.part == "requests":
            return []
        every = self._deployment.of_kind("router" if fault.part == "routers" else fault.part)
        can = [process for process in every if process.can_be_hurt]
        if not can or (fault.part == "worker" and len(can) < 2):
            return None
        return can if fault.part == "routers" else [can[fault.pick % len(can)]]

    async def _injure(self, fault: PlannedFault, victims: list[Process]) -> None:
        held = await self._held(fault, victims)
        victims = [victim for victim in victims if victim.can_be_hurt]  # Their state may have changed during `_held`.
        if not victims and fault.part not in ("nats", "requests"):
            return
        name = ", ".join(victim.name for victim in victims) or fault.part
        crash = fault.part == "worker" and fault.act in ("kill", "freeze", "cut", "slow")
        injury = self._ledger.injure(Injury(fault.kind, name, self._clock(), held=held, crash=crash))
        _log.info("fault.made", kind=fault.kind, victim=name, duration_s=fault.duration_s, held=len(held or ()))
        if fault.part == "nats":
            await self._hurt_nats(fault)
        elif fault.part == "requests":
            count = await publish_duplicates(self._connection, self._names, for_s=fault.duration_s)
            injury.note = f"{count} messages"
        else:
            await asyncio.gather(*(self._hurt(fault, victim) for victim in victims))
        injury.over_s = self._clock()
        _log.info("fault.mended", kind=fault.kind, victim=name, after_s=round(injury.over_s - injury.at_s, 2))

    async def _hurt(self, fault: PlannedFault, victim: Process) -> None:
        deployment, began = self._deployment, victim.started
        if fault.act == "freeze":
            deployment.freeze(victim)
            await asyncio.sleep(fault.duration_s)
            deployment.thaw(victim)
            return
        if fault.act in ("cut", "slow"):
            deployment.cut(victim, late_s=_LATE_S if fault.act == "slow" else None)
            await asyncio.sleep(fault.duration_s)
            deployment.mend(victim)
            return
        if fault.act == "kill":
            deployment.kill(victim)
        elif not await deployment.drain(victim, timeout_s=_DRAIN_TIMEOUT_S):
            self.troubles.append(f"{victim.name} did not end within {_DRAIN_TIMEOUT_S:g} s of SIGTERM")
        while victim.started == began or victim.child is None:
            await asyncio.sleep(_POLL_S)
        if victim.kind == "frontend":
            while not await deployment.frontends_ready():
                await asyncio.sleep(_POLL_S)

    async def _hurt_nats(self, fault: PlannedFault) -> None:
        server = self._deployment.server
        self._nats_hurt = True
        try:
            if fault.act == "freeze":
                server.pause()
                await asyncio.sleep(fault.duration_s)
                server.resume()
                return
            if fault.act == "stutter":
                await self._stutter(fault.duration_s)
                return
            server.kill()
            await asyncio.sleep(fault.duration_s)
            await server.restart_async(timeout_s=30.0)
        except JetStreamError as error:
            raise StartFailed(f"the NATS server does not come back: {error}") from error
        finally:
            self._nats_hurt = False

    async def _stutter(self, for_s: float) -> None:
        server, until_s = self._deployment.server, self._clock() + for_s
        while self._clock() < until_s:
            server.pause()
            await asyncio.sleep(_STOPS_S)
            server.resume()
            await asyncio.sleep(_RUNS_S)

    async def _held(self, fault: PlannedFault, victims: list[Process]) -> frozenset[str] | None:
        """Return the ids of the victims' requests, or None if they cannot be asked or the fault concerns all requests."""
        if fault.part == "frontend":
            names = {victim.name for victim in victims}
            return frozenset(entry.id for entry in self._ledger if entry.frontend in names and entry.id)
        if fault.part != "worker":
            return None
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                live = await live_workers(self._connection, self._names)
                pids = {victim.pid for victim in victims}
                ids = [member.worker for member in live if member.pid in pids]
                answers = await ask_all(self._connection, self._names, ids, Inspect(), Inspection)
        except (JetStreamError, WireError, TimeoutError):
            return None
        if not ids or None in answers:
            return None
        return frozenset(run.id for answer in answers if answer is not None for run in answer.runs)
