"""Replay of requests one after the other, without any timing: the effect of placement alone on hit rate and balance.

Every request has left its worker before the next one comes, and all job events and load reports have arrived; only the cache
changes of a request reach the routers late: after the next one is placed.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from headrace.broker.messages import JobEvent
from headrace.router.errors import ReplayStalled
from headrace.router.placement.types import Decision, Placement
from headrace.tools.replay_bench.ceiling import Ceiling
from headrace.tools.replay_bench.engine import ModelledEngine, ReplayJob
from headrace.tools.replay_bench.measure import balance, hit_rate
from headrace.tools.replay_bench.messages import (
    apply_changes,
    job_event,
    load_report,
    placed_event,
    waiting_of,
    worker_info,
    worker_name,
)
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.ports import Router
from headrace.tools.replay_bench.replay import ReplayPool
from headrace.tools.replay_bench.world import WAKE_AGAIN_S

LAG_BATCHES = 1  # batches of cache changes that are under way when a request is placed
PATIENCE_S = 60.0  # a request that is not placed on idle workers within this never will be
PAUSE_S = 0.01  # from the end of a request to the next one


class Sequential(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of a sequential run; as in `measure.Summary`."""

    policy: str
    routers: int
    seed: int
    requests: int
    shed: dict[str, int] = {}
    hit_rate: float
    of_infinite: float
    of_pooled: float
    balance_requests: float
    balance_uncached: float
    cpu_s: float = 0.0


def replay_sequential(pool: ReplayPool, policy: Policy, *, limit: Ceiling) -> Sequential:
    """Replay the whole trace. Raises ReplayStalled for a request that is not placed, and SettingsInvalid."""
    began = time.process_time()
    run = _Run(pool, policy)
    for index in range(len(pool.trace.requests)):
        run.one(index)
    hit = hit_rate(run.jobs)
    return Sequential(
        policy=policy.label,
        routers=pool.routers,
        seed=pool.seed,
        requests=len(pool.trace.requests),
        shed=dict(run.shed),
        hit_rate=hit,
        of_infinite=hit / limit.infinite if limit.infinite else 0.0,
        of_pooled=hit / limit.pooled if limit.pooled else 0.0,
        balance_requests=balance((1 for _ in run.jobs), run.jobs, workers=pool.workers),
        balance_uncached=balance((j.uncached for j in run.jobs), run.jobs, workers=pool.workers),
        cpu_s=time.process_time() - began,
    )


class _Run:
    def __init__(self, pool: ReplayPool, policy: Policy) -> None:
        self._pool = pool
        self._rng = random.Random(f"deal {pool.seed}")  # noqa: S311 - reproducible, not secret
        self._engines = {worker_name(n): ModelledEngine(pool.model, index=n) for n in range(pool.workers)}
        self._routers = [policy.router(f"router-{n}", pool.seed * 1000 + n) for n in range(pool.routers)]
        self._late: deque[tuple[str, Sequence[int], Sequence[int]]] = deque()
        self._reports = 0
        self._now_s = 0.0
        self.jobs: list[ReplayJob] = []
        self.shed: Counter[str] = Counter()
        for router in self._routers:
            router.scheduler.set_routers(r.name for r in self._routers)
            for name in self._engines:
                router.view.add_worker(name, capacity_blocks=pool.model.blocks)
                router.scheduler.put_worker(worker_info(name, pool.model), 0.0)
        for name in self._engines:
            self._report(name)

    def one(self, index: int) -> None:
        """Place a request, let it run to its end, and tell all routers."""
        job = ReplayJob(index=index, request=self._pool.trace.requests[index])
        router = self._rng.choice(self._routers)
        placement = self._placement(router, job)
        if placement is None:
            return
        for other in self._routers:
            if other is not router:
                other.scheduler.on_event(placed_event(placement, router.name), self._now_s)
        while len(self._late) >= LAG_BATCHES:
            self._apply(*self._late.popleft())
        self._run(job, placement.worker)
        self.jobs.append(job)

    def _placement(self, router: Router, job: ReplayJob) -> Placement | None:
        scheduler, until_s = router.scheduler, self._now_s + PATIENCE_S
        shed = scheduler.offer(waiting_of(job, arrived_s=self._now_s), self._now_s)
        decisions: Sequence[Decision] = [shed] if shed is not None else scheduler.decide(self._now_s)
        while not decisions:
            wake_s = scheduler.next_wake_s(self._now_s)
            if wake_s is None or wake_s > until_s:
                raise ReplayStalled(
                    f"request {job.index} of {self._pool.trace.name} is not placed although all workers are idle"
                )
            self._now_s = max(wake_s, self._now_s + WAKE_AGAIN_S)
            decisions = scheduler.decide(self._now_s)
        decision = decisions[0]
        if isinstance(decision, Placement):
            return decision
        self.shed[decision.code] += 1
        return None

    def _run(self, job: ReplayJob, worker: str) -> None:
        engine = self._engines[worker]
        engine.submit(job, self._now_s)
        self._deliver_event(job_event("started", job, worker))
        while engine.step_ends_s is not None:
            self._now_s = engine.step_ends_s
            step = engine.end_step(self._now_s)
            if step.stored or step.removed:
                self._late.append((worker, step.stored, step.removed))
            for done in step.prefilled:
                self._deliver_event(job_event("prefilled", done, worker))
            for done in step.settled:
                self._deliver_event(job_event("settled", done, worker))
        self._report(worker)
        self._now_s += PAUSE_S

    def _deliver_event(self, event: JobEvent) -> None:
        for router in self._routers:
            router.scheduler.on_event(event, self._now_s)

    def _report(self, worker: str) -> None:
        self._reports += 1
        report = load_report(self._engines[worker], worker, n=self._reports, now_s=self._now_s)
        for router in self._routers:
            router.scheduler.on_report(report, self._now_s)

    def _apply(self, worker: str, stored: Sequence[int], removed: Sequence[int]) -> None:
        for router in self._routers:
            apply_changes(router.view, worker, stored=stored, removed=removed, now_s=self._now_s)
