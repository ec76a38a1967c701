"""A scheduler that knows nothing of caches: a random worker with room. For protocol tests, where only the I/O matters."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.broker.messages.control import Candidate, Explanation
from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.router.placement.types import Decision, Placement, Shed, Waiting, WorkerInfo

FORGOTTEN_S = 10.0  # a placement that nobody has confirmed takes up no room any more


@dataclass
class RandomScheduler:
    """`shed`: this part of the first attempts is refused; never what may have given tokens already."""

    rng: random.Random
    shed: float = 0.0
    several_tenants: bool = False
    workers: dict[str, WorkerInfo] = field(default_factory=dict)
    window: dict[str, Waiting] = field(default_factory=dict)
    placed: dict[tuple[str, int], tuple[str, float]] = field(default_factory=dict)
    explanations: dict[str, Explanation] = field(default_factory=dict)

    def put_worker(self, info: WorkerInfo, now_s: float) -> None:
        self.workers[info.worker] = info

    def remove_worker(self, worker: str, now_s: float) -> None:
        self.workers.pop(worker, None)

    def set_routers(self, names: Iterable[str]) -> None:
        pass

    def on_report(self, report: LoadReport, now_s: float) -> None:
        pass

    def on_event(self, event: JobEvent, now_s: float) -> None:
        if event.kind in ("settled", "moved"):
            self.placed.pop((event.id, event.attempt), None)

    def place_now(self, request: Waiting, now_s: float) -> Placement | None:
        return None  # everything waits for `decide`

    def offer(self, request: Waiting, now_s: float) -> Shed | None:
        if request.attempt == 1 and self.rng.random() < self.shed:
            return Shed(request=request, code="queue_full", message="no room", retry_after_s=1.0)
        self.window[request.id] = request
        return None

    def assess(self, request_id: str, *, limit: int, crashes: int) -> None:
        pass

    def cancel(self, ids: Iterable[str]) -> list[Waiting]:
        return [self.window.pop(request_id) for request_id in ids if request_id in self.window]

    def decide(self, now_s: float) -> list[Decision]:
        decisions: list[Decision] = []
        for key, (_worker, at_s) in list(self.placed.items()):
            if now_s - at_s > FORGOTTEN_S:
                del self.placed[key]
        for request in list(self.window.values()):
            if request.deadline_s <= now_s:
                del self.window[request.id]
                decisions.append(Shed(request=request, code="deadline", message="too late"))
                continue
            room = [name for name, info in self.workers.items() if not info.draining and self._free(info) > 0]
            if not room:
                continue
            del self.window[request.id]
            decisions.append(self._place(request, self.rng.choice(room), now_s))
        return decisions

    @property
    def suspects_awaiting_lost(self) -> int:
        return 0

    def queued_prefill_tokens(self, now_s: float) -> float:
        return 0.0

    def _place(self, request: Waiting, worker: str, now_s: float) -> Placement:
        self.placed[request.id, request.attempt] = worker, now_s
        waited_s = now_s - request.arrived_s
        candidates = [Candidate(worker=name) for name in self.workers]
        self.explanations[request.id] = Explanation(
            id=request.id,
            policy="random",
            state="placed",
            worker=worker,
            reason="policy",
            waited_s=waited_s,
            candidates=candidates,
        )
        return Placement(
            request=request,
            worker=worker,
            uncached=request.tokens,
            new_blocks=list(request.chain),
            predicted_ttft_s=waited_s,
            waited_s=waited_s,
            reason="policy",
            candidates=candidates,
        )

    def _free(self, info: WorkerInfo) -> int:
        return info.slots - sum(worker == info.worker for worker, _ in self.placed.values())

    def next_wake_s(self, now_s: float) -> float | None:
        return min((request.deadline_s for request in self.window.values()), default=None)

    def unplace(self, placement: Placement, now_s: float) -> None:
        self.placed.pop((placement.request.id, placement.request.attempt), None)
        self.window[placement.request.id] = placement.request

    @property
    def waiting(self) -> int:
        return len(self.window)

    def explain(self, request_id: str, now_s: float) -> Explanation | None:
        return self.explanations.get(request_id)
