"""Defines the parts of the world of `benchmarks.disagg.world`: requests, their outcome, and simulated workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.broker.messages.requests import PrefillDecision
from headrace.broker.prefill_server import TokenBudget
from headrace.router.placement.types import WorkerInfo
from headrace.workers.engine import Role
from headrace.workers.sim.control import FabricMember
from headrace.workers.sim.fabric import HandoverWire, LocalFabric
from headrace.workers.sim.scheduler import SimScheduler, block_manager
from headrace.workers.sim.settings import SimSettings
from headrace.workers.sim.tokens import bundled_vocabulary


@dataclass(slots=True)
class Request:
    """A request of the workload; `kind` tells its sort apart in the figures."""

    at_s: float
    kind: str
    tokens: list[int]
    chain: list[int]
    output: int


@dataclass(slots=True)
class Served:
    """Times of a request, in seconds, -1 = never."""

    id: str
    request: Request
    worker: str = ""
    prefill: PrefillDecision | None = None
    fell_back: bool = False
    first_s: float = -1.0
    last_s: float = -1.0
    ready_s: float = -1.0  # its blocks were ready to be fetched
    gaps: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.at_s


class Node:
    """A worker: an engine and what its runtime keeps."""

    def __init__(
        self,
        name: str,
        role: Role,
        settings: SimSettings,
        *,
        fabric: LocalFabric,
        clock: Callable[[], float],
        stir: Callable[[Node], None],
    ) -> None:
        """`stir`: there may be something to do for its engine."""
        self.name = name
        self.role = role
        manager = block_manager(settings)
        wire = None
        if settings.hands_over(role):
            wire = HandoverWire(
                model="m",
                role=role,
                settings=settings,
                timing=settings.timing_model(),
                manager=manager,
                clock=clock,
            )
        self.engine = SimScheduler(settings, bundled_vocabulary(), manager=manager, clock=clock, wire=wire)
        if wire is not None:
            FabricMember(wire, self.engine, fabric, name, wake=lambda: stir(self))
        self.manager = manager
        self.busy = False
        self.step_ends_s = 0.0
        self.wake_s = float("inf")
        self.runs = 0
        self.waits = 0  # for prompts computed elsewhere
        self.named: deque[Served] = deque()
        self.budget = TokenBudget(settings.step_tokens)
        self.idle_since_s = 0.0
        self.handover: tuple[float, int] = (0.0, 0)
        self.reports = 0
        self.reported_s = -1.0
        self.report_due = False
        self.busy_s = 0.0

    def info(self, settings: SimSettings) -> WorkerInfo:
        """As its lease would say it."""
        return WorkerInfo(
            worker=self.name,
            slots=settings.slots,
            blocks=settings.blocks,
            block_size=settings.block_size,
            step_tokens=settings.step_tokens,
            epoch=1,
            role=self.role.value,
            handover="" if self.role is Role.AGGREGATED else "sim",
        )
