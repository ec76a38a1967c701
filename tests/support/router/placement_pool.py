"""A pool as a test drives it: a real scheduler over real caches, with a hand-moved clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.router.index.view import Caches, create_index
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Decision, Placement, Waiting, WorkerInfo

BLOCK = 512


def chain(name: int, length: int) -> list[int]:
    """The chain values of a prompt of its own."""
    return [name * 1_000_000 + n + 1 for n in range(length)]


class Pool:
    """Workers `a`, `b`, … with 8 slots each, steps of 8,192 tokens and 24,000 tokens/s."""

    def __init__(self, workers: str = "ab", *, name: str = "r1", **settings: Any) -> None:
        self.view = Caches(create_index())
        self.scheduler = Scheduler(SchedulerSettings(**settings), self.view, name=name)
        self.now = 100.0
        self.reports = 0
        for worker in workers:
            self.join(worker)

    def join(self, worker: str, **info: Any) -> None:
        self.view.add_worker(worker)
        fields: dict[str, Any] = {"slots": 8, "block_size": BLOCK, "step_tokens": 8192, "epoch": 1, **info}
        self.scheduler.put_worker(WorkerInfo(worker=worker, **fields), self.now)

    def apart(self, *, decode: str = "", prefill: str = "", handover: str = "sim", **info: Any) -> None:
        """Decode and prefill workers that hand over to each other."""
        for role, workers in (("decode", decode), ("prefill", prefill)):
            for worker in workers:
                self.join(worker, role=role, handover=handover, **info)

    def holds(self, worker: str, blocks: Sequence[int], tier: Any = "device") -> None:
        self.view.apply(worker, removed={}, stored={tier: blocks}, now_s=self.now)

    def report(self, worker: str, **fields: Any) -> None:
        self.reports += 1
        values: dict[str, Any] = {"slots": 8, "running": 0, "waiting": 0, **fields}
        report = LoadReport(worker=worker, epoch=1, n=self.reports, at=self.now, **values)
        self.scheduler.on_report(report, self.now)

    def event(self, kind: Any, request_id: str, worker: str, attempt: int = 1, **fields: Any) -> None:
        self.scheduler.on_event(JobEvent(kind, request_id, attempt, worker, **fields), self.now)

    def offer(self, request_id: str, blocks: Sequence[int] = (), **fields: Any) -> Any:
        values: dict[str, Any] = {"tokens": max(len(blocks) * BLOCK, 1), "block_size": BLOCK, "arrived_s": self.now, **fields}
        return self.scheduler.offer(Waiting(id=request_id, chain=blocks, **values), self.now)

    def decide(self) -> list[Decision]:
        return self.scheduler.decide(self.now)

    def placed(self) -> dict[str, str]:
        """Request → worker, of what is placed now."""
        return {one.request.id: one.worker for one in self.decide() if isinstance(one, Placement)}

    def placement(self) -> Placement:
        """The only thing decided now."""
        (decision,) = self.decide()
        assert isinstance(decision, Placement)
        return decision

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
