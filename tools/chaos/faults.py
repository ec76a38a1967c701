"""Faults of a chaos run: drawn from a seed, so that the same seed and kinds give the same faults, and injected."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import structlog

from headrace.base.errors import StartFailed
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Inspect, Inspection
from headrace.commands.control import ask_all, live_workers
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.deployment import ChaosDeployment, Process, until_well
from headrace.tools.chaos.ledger import Injury, Ledger

Act = Literal["kill", "freeze", "drain", "restart", "cut", "slow", "stutter", "repeat"]
Part = Literal["worker", "prefill", "router", "routers", "frontend", "nats", "requests"]

# A kind is a part and an act; its weight is its relative frequency.
KINDS: dict[str, float] = {
    "worker kill": 4,
    "worker freeze": 3,
    "worker drain": 2,
    "worker cut": 3,  # The worker's link to the NATS server carries nothing for a while.
    "worker slow": 2,  # The worker's link delays everything, so that its lease is refreshed on an old clock.
    "prefill kill": 3,
    "prefill freeze": 2,
    "prefill drain": 1,
    "prefill cut": 1,
    "router kill": 2,
    "router freeze": 2,
    "router drain": 1,
    "router cut": 1,
    "router slow": 1,
    "routers kill": 1,  # all routers at once
    "frontend kill": 1,
    "frontend freeze": 1,
    "frontend drain": 1,
    "frontend cut": 1,
    "nats restart": 2,  # killed, and started again
    "nats freeze": 1,
    "nats stutter": 1,  # The server stops again and again, as a server does that waits for its disk.
    "requests repeat": 2,  # messages with requests are stored twice
}
_DURATION_S = {
    "freeze": (0.5, 8.0),
    "restart": (1.0, 10.0),
    "cut": (0.5, 12.0),
    "slow": (3.0, 8.0),
    "stutter": (2.0, 6.0),
    "repeat": (1.0, 3.0),
}
_LONGEST_NATS_FREEZE_S = 4.0
_SECOND_AT_ONCE = 0.2  # share of faults that are injected while the last one is still being mended


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault of the schedule. `pick` chooses among the possible victims. `gap_s` is the time before the fault.

    `duration_s`: the length of a fault that lasts. `settled`: the fault is injected only after the deployment is well again,
    not while the last fault is being mended.
    """

    kind: str
    pick: int
    duration_s: float
    gap_s: float
    settled: bool

    @property
    def part(self) -> str:
        return self.kind.partition(" ")[0]

    @property
    def act(self) -> str:
        return self.kind.partition(" ")[2]


def kinds_of(mode: str) -> list[str]:
    """Return the kinds possible in `mode`. Prefill workers exist in the mode `disagg` only."""
    return [kind for kind in KINDS if mode == "disagg" or not kind.startswith("prefill")]


def draw_faults(seed: int, kinds: Sequence[str]) -> Iterator[PlannedFault]:
    """Draw faults without end. Each kind comes once, in random order, before any comes twice."""
    rng = random.Random(f"faults {seed}")  # noqa: S311  # a schedule, not a secret
    first = rng.sample(list(kinds), len(kinds))
    while True:
        kind = first.pop() if first else rng.choices(list(kinds), [KINDS[kind] for kind in kinds])[0]
        least, most = _DURATION_S.get(kind.partition(" ")[2], (0.0, 0.0))
        if kind == "nats freeze":
            most = _LONGEST_NATS_FREEZE_S
        yield PlannedFault(
            kind=kind,
            pick=rng.getrandbits(16),
            duration_s=round(rng.uniform(least, most), 2),
            gap_s=round(rng.uniform(1.0, 4.0), 2),
            settled=rng.random() >= _SECOND_AT_ONCE,
        )


_MOST = 16
_MSG_ID = "nats-msg-id"
_PUBLISH_TIMEOUT_S = 1.0


async def publish_duplicates(connection: Connection, names: Subjects, *, for_s: float) -> int:
    """Publish again every request and placement seen within `for_s` seconds, at most 16. Returns their number.

    The copy has no message id, because the server would drop it as a duplicate.
    """
    seen: asyncio.Queue[Message] = asyncio.Queue(_MOST)
    known: set[tuple[str, bytes]] = set()  # The subscriptions also deliver the copies.

    def on_message(message: Message) -> None:
        key = (message.subject, message.data)
        if key not in known and not seen.full():
            known.add(key)
            seen.put_nowait(message)

    wanted = (f"{names.prefix}.req.>", f"{names.prefix}.work.>")
    subscriptions = [await connection.subscribe(subject, on_message) for subject in wanted]
    loop = asyncio.get_running_loop()
    until_s, count = loop.time() + for_s, 0
    try:
        while count < _MOST:
            async with asyncio.timeout_at(until_s):
                message = await seen.get()
            headers = {name: value for name, value in (message.headers or {}).items() if name.lower() != _MSG_ID}
            try:
                await connection.publish(message.subject, message.data, headers=headers, timeout_s=_PUBLISH_TIMEOUT_S)
            except JetStreamError:
                continue  # A fault may be made to the server at the same time.
            count += 1
    except (TimeoutError, WireError):
        pass
    finally:
        for subscription in subscriptions:
            await subscription.unsubscribe()
    return count


_STALL_POLL_S = 0.05
_ASK_EVERY_S = 0.25
_KEY = "chaos.pulse"
_AFTERWARDS_S = 2.0  # The server may still be slow for so long after a fault.


class HostStalls:
    """Measures the longest stalls of this process and of the NATS server.

    `own_s`: the longest time that this process did not run when it should have. `server_s`: the longest time that the server
    took to store a few bytes while no fault was made to it.
    """

    def __init__(self, connection: Connection, names: Subjects, ledger: Ledger, *, clock: Callable[[], float]) -> None:
        self.own_s = 0.0
        self.server_s = 0.0
        self._bucket = connection.bucket(names.bucket("state"))
        self._ledger = ledger
        self._clock = clock

    async def run(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._watch_self())
            both.create_task(self._watch_server())

    async def _watch_self(self) -> None:
        while True:
            began = self._clock()
            await asyncio.sleep(_STALL_POLL_S)
            self.own_s = max(self.own_s, self._clock() - began - _STALL_POLL_S)

    async def _watch_server(self) -> None:
        while True:
            began = self._clock()
            with suppress(JetStreamError):  # A write that timed out counts with the time it took.
                await self._bucket.put(_KEY, b"")
            ended = self._clock()
            if not self._hurt(began, ended):
                self.server_s = max(self.server_s, ended - began)
            await asyncio.sleep(_ASK_EVERY_S)

    def _hurt(self, first_s: float, last_s: float) -> bool:
        return any(
            injury.kind.startswith("nats") and injury.at_s <= last_s and first_s <= injury.over_s + _AFTERWARDS_S
            for injury in self._ledger.injuries
        )


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
