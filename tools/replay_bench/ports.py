"""Ports of the benchmark: the router as it uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from headrace.broker.messages import JobEvent, LoadReport
from headrace.router.index.types import CacheView
from headrace.router.placement.types import Decision, Shed, Waiting, WorkerInfo


class Scheduling(Protocol):
    """The methods of `headrace.router.placement.scheduler.Scheduler` that the world calls."""

    def set_routers(self, names: Iterable[str]) -> None: ...

    def put_worker(self, info: WorkerInfo, now_s: float) -> None: ...

    def on_report(self, report: LoadReport, now_s: float) -> None: ...

    def on_event(self, event: JobEvent, now_s: float) -> None: ...

    def offer(self, request: Waiting, now_s: float) -> Shed | None: ...

    def decide(self, now_s: float) -> list[Decision]: ...

    def next_wake_s(self, now_s: float) -> float | None: ...

    @property
    def waiting(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A scheduler, its view of the caches, and its name in `placed` events."""

    name: str
    scheduler: Scheduling
    view: CacheView


MakeRouter = Callable[[str, int], Router]
"""(name, seed) → a router without workers."""
