"""A scripted engine that hands prompts over, under the real runtime and sessions: both styles, with all that can go wrong.

What a real engine could not tell is checked here: blocks that are fetched after their lease has ended are a violation.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.workers.engine import Capabilities, DisaggStyle, EngineInfo, Fault, KvBatch, Load, Output, Role, Sink
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.errors import UnsupportedByEngine
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.world import Violation

TOKEN_S = 0.05
PREFILL_S = 0.002  # per token
TRANSFER_S = 0.02
HANDSHAKE_S = 1.0  # with an engine that does not answer
ROOM_S = 3.0
LEASE_S = 6.0
VOCABULARY = 40_000


def token(prompt: Sequence[int], position: int) -> int:
    """What every engine answers to this prompt at this position."""
    return zlib.crc32(f"{zlib.crc32(repr(list(prompt)).encode())}/{position}".encode()) % VOCABULARY + 100


@dataclass(eq=False)
class Cluster:
    """All engines there are or were, by address."""

    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    fetched: int = 0
    local: int = 0
    breaks: int = 0  # how many of the next transfers fail
    stalls: int = 0  # … or never end
    transfer_s: float = TRANSFER_S

    def reach(self, address: str) -> ScriptedEngine | None:
        engine = self.engines.get(address)
        return engine if engine is not None and engine.machine.alive and not engine.machine.cut else None


class ScriptedEngine:
    """Implements `headrace.workers.engine.Engine`, as far as the runtime uses it."""

    def __init__(self, machine: Machine, cluster: Cluster, style: DisaggStyle, *, lease_s: float = LEASE_S) -> None:
        self.machine = machine
        self.cluster = cluster
        self.sink: Sink = lambda outputs: None
        self.style = style
        self.lease_s = lease_s
        self.running: dict[str, asyncio.Task[None]] = {}
        self.offers: dict[str, float] = {}  # until when
        self.rooms: dict[int, asyncio.Event] = {}  # of a prefill side: set when the decode side has come
        self.met: dict[int, str] = {}  # of a decode side: how its room ended
        self.tasks: asyncio.TaskGroup | None = None
        self.capabilities = Capabilities(
            roles=frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE}), disagg=style, kv_events=False
        )
        self.address = machine.id
        cluster.engines[self.address] = self

    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="scripted",
            version="0",
            tokenizer_dir="",
            context_length=4096,
            block_size=16,
            blocks=1000,
            slots=4,
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            handover="scripted",
            lease_s=self.lease_s,
            address=self.address,
        )

    # -- the engine protocol ------------------------------------------------------------------------------------

    async def submit(self, sequence: EngineSequence) -> None:
        assert self.tasks is not None
        if sequence.id in self.running:
            raise Violation(f"submitted twice: {sequence.id}")
        task = self.tasks.create_task(self._run(sequence))
        self.running[sequence.id] = task
        task.add_done_callback(lambda _: self.running.pop(sequence.id, None))

    async def abort(self, ids: Sequence[str]) -> None:
        for name in ids:
            if (task := self.running.pop(name, None)) is not None:
                task.cancel()

    async def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        self.offers.pop(sequence_id, None)

    async def set_role(self, role: Role) -> None:
        if self.running:
            raise Violation(f"{self.address} changes its role with {len(self.running)} sequences inside")
        if role not in self.capabilities.roles:
            raise UnsupportedByEngine(role)

    def meet(self, peers: Mapping[str, bytes]) -> None: ...

    def load(self) -> Load:
        return Load()

    async def died(self) -> str:
        return await asyncio.get_running_loop().create_future()

    def blamed(self) -> frozenset[str]:
        return frozenset()

    def kv_events(self, rank: int = 0) -> AsyncGenerator[KvBatch]:
        raise NotImplementedError

    # -- what it does -------------------------------------------------------------------------------------------

    async def _run(self, sequence: EngineSequence) -> None:
        handover = sequence.handover
        if handover is not None and handover.kind == "prefill":
            await self._prefill(sequence, handover.room)
            return
        if handover is None:
            await asyncio.sleep(PREFILL_S * len(sequence.token_ids))
            self.cluster.local += 1
        else:
            error = await (self._fetch(handover.params or {}) if handover.room is None else self._enter(handover))
            if error:
                self.sink([Output(sequence.id, [], fault=Fault("transfer_failed", error, retriable=True))])
                return
            self.cluster.fetched += 1
        await self._decode(sequence)

    async def _prefill(self, sequence: EngineSequence, room: int | None) -> None:
        if room is not None:
            self.rooms[room] = asyncio.Event()
        await asyncio.sleep(PREFILL_S * len(sequence.token_ids))
        params = None
        if room is None:
            params = {"engine": self.address, "job": sequence.id}
            self.offers[sequence.id] = self.machine.loop.time() + self.lease_s
            self.machine.loop.call_later(self.lease_s, self.offers.pop, sequence.id, None)
        else:
            try:
                async with asyncio.timeout(ROOM_S):
                    await self.rooms[room].wait()
                await asyncio.sleep(self.cluster.transfer_s)
            except TimeoutError:
                self.sink([Output(sequence.id, [], fault=Fault("transfer_failed", "nobody came", retriable=True))])
                return
            finally:
                self.rooms.pop(room, None)
            for engine in self.cluster.engines.values():
                if room in engine.met:
                    engine.met[room] = "written"
        self.sink([Output(sequence.id, [1], finish="length", cached_tokens=0, handover=params)])

    async def _fetch(self, params: Mapping[str, Any]) -> str:
        if self.cluster.stalls:
            self.cluster.stalls -= 1
            await asyncio.sleep(1000.0)
        peer = self.cluster.reach(params["engine"])
        if peer is None:
            await asyncio.sleep(HANDSHAKE_S)
            return "no answer"
        await asyncio.sleep(self.cluster.transfer_s)
        if self.cluster.breaks:
            self.cluster.breaks -= 1
            return "broken"
        if self.cluster.reach(params["engine"]) is None:
            return "went away"
        until = peer.offers.pop(params["job"], None)
        if until is None:
            raise Violation(f"{self.address} fetched blocks that nobody keeps: {params}")
        return ""

    async def _enter(self, handover: Any) -> str:
        peer = self.cluster.reach(handover.peer)
        if peer is None or handover.room not in peer.rooms:
            await asyncio.sleep(HANDSHAKE_S)
            peer = self.cluster.reach(handover.peer)
        if peer is None or handover.room not in peer.rooms:
            return "nobody in the room"
        self.met[handover.room] = ""
        peer.machine.loop.call_soon(peer.rooms[handover.room].set)
        try:
            async with asyncio.timeout(ROOM_S):
                while not self.met[handover.room]:
                    await asyncio.sleep(self.cluster.transfer_s)
        except TimeoutError:
            return "nothing was written"
        finally:
            del self.met[handover.room]
        return ""

    async def _decode(self, sequence: EngineSequence) -> None:
        prompt = sequence.token_ids[: sequence.prompt_tokens]
        start = len(sequence.token_ids) - sequence.prompt_tokens
        end = start + (sequence.sampling.max_tokens or 1)
        for position in range(start, end):
            await asyncio.sleep(TOKEN_S)
            self.sink(
                [
                    Output(
                        sequence.id,
                        [token(prompt, position)],
                        finish="length" if position == end - 1 else None,
                        cached_tokens=0 if position == start else None,
                    )
                ]
            )
