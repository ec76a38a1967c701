"""Simulated engines on one fabric, in virtual time."""

from __future__ import annotations

from typing import Any

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Fault, Handover, Output, Role, Sequence
from headrace.workers.sim.blocks import Content
from headrace.workers.sim.control import FabricMember
from headrace.workers.sim.fabric import HandoverWire, LocalEndpoint, LocalFabric, Member, Transfer
from headrace.workers.sim.scheduler import SimScheduler, block_manager
from headrace.workers.sim.settings import SequenceFaults, SimSettings
from headrace.workers.sim.tokens import bundled_vocabulary

SIZE = 4
NO_FAULTS = SequenceFaults()


def sequence(name: str, tokens: list[int], *, max_tokens: int = 10, **options: Any) -> Sequence:
    return Sequence(id=name, token_ids=tokens, prompt_tokens=len(tokens), sampling=Sampling(max_tokens=max_tokens), **options)


class Held:
    """A transfer that ends when the test says so."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.ended = self.settled = self.failed = False

    def end(self) -> None:
        self.ended = self.settled = True

    def finish(self) -> str:
        return self.transfer.finish()


class HeldEndpoint(LocalEndpoint):
    """Its transfers do not end by themselves."""

    held: list[Held]

    def read(self, engine: str, remote: Any, local: Any) -> Transfer:
        return self._hold(super().read(engine, remote, local))

    def write(self, engine: str, local: Any, remote: Any) -> Transfer:
        return self._hold(super().write(engine, local, remote))

    def _hold(self, transfer: Transfer) -> Transfer:
        self.held.append(Held(transfer))
        return self.held[-1]


class HoldingFabric(LocalFabric):
    """A fabric whose transfers take as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []

    def join(self, engine: str, member: Member) -> LocalEndpoint:
        super().join(engine, member)
        endpoint = HeldEndpoint(self, engine, member)
        endpoint.held = self.held
        return endpoint


class Node:
    """One engine, and per sequence what came out of it and when."""

    def __init__(self, world: World, name: str, role: Role, **options: Any) -> None:
        settings = SimSettings(**{"block_size": SIZE, "blocks": 64, "context_length": 128, "fabric": "local", **options})
        manager = block_manager(settings)
        wire = None
        if settings.hands_over(role):
            wire = HandoverWire(
                model="m",
                role=role,
                settings=settings,
                timing=settings.timing_model(),
                manager=manager,
                clock=lambda: world.now,
            )
        self.scheduler = SimScheduler(settings, bundled_vocabulary(), manager=manager, clock=lambda: world.now, wire=wire)
        self.member = None
        if wire is not None:
            self.member = FabricMember(wire, self.scheduler, world.fabric, name, wake=lambda: None)
        self.manager = manager
        self.world = world
        self.busy_until = 0.0
        self.outputs: dict[str, list[tuple[float, Output]]] = {}
        self.events: list[Any] = []
        self.alive = True

    def submit(self, name: str, tokens: list[int], *, faults: SequenceFaults = NO_FAULTS, **options: Any) -> None:
        self.scheduler.submit(sequence(name, tokens, **options), faults)

    def prefill(self, name: str, tokens: list[int], **options: Any) -> None:
        self.submit(name, tokens, handover=Handover(kind="prefill"), **options)

    def decode(self, name: str, tokens: list[int], params: Any, **options: Any) -> None:
        self.submit(name, tokens, handover=Handover(kind="decode", params=params), **options)

    def kill(self) -> None:
        self.alive = False
        assert self.member is not None
        self.member.leave()

    def ids(self, name: str) -> list[int]:
        return [token for _, output in self.outputs.get(name, []) for token in output.ids]

    def last(self, name: str) -> Output:
        return self.outputs[name][-1][1]

    def params(self, name: str) -> Any:
        return self.last(name).handover

    def fault(self, name: str) -> Fault | None:
        return self.last(name).fault

    def ended(self, name: str) -> bool:
        return name in self.outputs and bool(self.last(name).finish or self.last(name).fault)

    def ended_at(self, name: str) -> float:
        return self.outputs[name][-1][0]

    @property
    def used(self) -> int:
        return self.manager.used

    def step(self) -> bool:
        result = self.scheduler.step()
        self.manager.check()
        if result is None:
            self.events += self.manager.take_events()
            return False
        self.busy_until = self.world.now + result.duration_s
        self.events += result.events
        for output in result.outputs:
            self.outputs.setdefault(output.id, []).append((self.busy_until, output))
        return True


class World:
    """All engines and the time."""

    def __init__(self, fabric: LocalFabric | None = None) -> None:
        self.fabric = fabric or LocalFabric()
        self.nodes: list[Node] = []
        self.now = 0.0

    def node(self, name: str, role: Role = Role.AGGREGATED, **options: Any) -> Node:
        node = Node(self, name, role, **options)
        self.nodes.append(node)
        return node

    def pair(self, **options: Any) -> tuple[Node, Node]:
        return self.node("p", Role.PREFILL, **options), self.node("d", Role.DECODE, **options)

    def run(self, seconds: float = 600.0) -> None:
        """Until nothing more happens by itself, or this much time has passed."""
        end = self.now + seconds
        for _ in range(20_000):
            alive = [node for node in self.nodes if node.alive]
            stepped = [node.step() for node in alive if node.busy_until <= self.now]
            if any(stepped):
                continue
            times = [node.busy_until for node in alive if node.busy_until > self.now]
            due = [at for node in alive if node.busy_until <= self.now and (at := node.scheduler.next_at()) is not None]
            if due and min(due) <= self.now:
                continue
            times += due
            if not times or min(times) > end:
                if seconds < 600.0 or times:
                    self.now = end
                return
            self.now = min(times)
        raise AssertionError("does not come to an end")


def contents(chain: list[int], tokens: list[int], size: int) -> list[Content]:
    """Describe the whole blocks of a sequence as the cache keeps them."""
    return [
        Content(value, chain[n - 1] if n else None, tuple(tokens[n * size : (n + 1) * size]), None, None)
        for n, value in enumerate(chain)
    ]
