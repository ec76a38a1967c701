"""Replays of a trace in time: one, all policies side by side, and the search for the load that a policy can bear."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from headrace.broker.messages.events import JobEvent
from headrace.router.errors import ReplayStalled
from headrace.router.placement.types import Decision, Placement
from headrace.tools.replay_bench.classic import SWEEP, ClassicWeights, Router
from headrace.tools.replay_bench.engine import EngineModel, ModelledEngine, ReplayFleet, ReplayJob
from headrace.tools.replay_bench.measure import GOAL_TTFT_S, RunFacts, Summary, balance, hit_rate, summarise
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.trace import Ceiling, Trace, accelerate, ceiling
from headrace.tools.replay_bench.world import (
    WAKE_AGAIN_S,
    Delays,
    ReplayOutcome,
    World,
    apply_changes,
    job_event,
    load_report,
    placed_event,
    waiting_of,
    worker_info,
    worker_name,
)

KNEE_PRECISION = 0.01  # the knee is known when the bracket is so narrow, relatively
LOWEST_RATE, HIGHEST_RATE = 1 / 64, 64.0  # a knee is searched between these


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPool:
    trace: Trace
    workers: int
    model: EngineModel
    routers: int = 1
    seed: int = 0
    deadline_s: float = float("inf")
    delays: Delays = field(default_factory=Delays)

    def ceiling(self) -> Ceiling:
        return ceiling(self.trace, pooled_blocks=self.workers * self.model.blocks)


@dataclass(frozen=True, slots=True)
class Replay:
    summary: Summary
    outcomes: list[ReplayOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """The highest rate at which the policy kept TTFT p90 within the goal. `summary` is the replay there."""

    policy: Policy
    rate: float
    summary: Summary
    replays: int


def replay(pool: ReplayPool, policy: Policy, *, rate: float, limit: Ceiling) -> Replay:
    """Replay a trace at `rate` times its own speed. `limit` is the pool's ceiling.

    Raises ReplayStalled, SettingsInvalid.
    """
    world = World(
        trace=accelerate(pool.trace, rate),
        fleets=(ReplayFleet(workers=pool.workers, model=pool.model),),
        make_router=policy.router,
        routers=pool.routers,
        seed=pool.seed,
        deadline_s=pool.deadline_s,
        delays=pool.delays,
    )
    began = time.process_time()
    outcomes = world.run()
    facts = RunFacts(policy.label, workers=pool.workers, routers=pool.routers, seed=pool.seed, rate=rate)
    cpu_s = time.process_time() - began
    summary = summarise(outcomes, facts, ceiling=limit, decisions=world.decisions, cpu_s=cpu_s)
    return Replay(summary, outcomes)


def replay_classic(
    pool: ReplayPool, policy: Policy, *, rate: float, limit: Ceiling, sweep: Sequence[ClassicWeights] = SWEEP
) -> Replay:
    """Replay `classic` with the weights that give the lowest TTFT p90 at this rate, then the lowest mean."""

    def rank(done: Replay) -> tuple[float, float]:
        ttft = done.summary.ttft_s
        return _or_infinite(ttft.p90), _or_infinite(ttft.mean)

    return min((replay(pool, replace(policy, weights=weights), rate=rate, limit=limit) for weights in sweep), key=rank)


def find_knee(
    pool: ReplayPool,
    policy: Policy,
    *,
    limit: Ceiling,
    start: float = 4.0,
    precision: float = KNEE_PRECISION,
    progress: Callable[[Summary], None] | None = None,
) -> Knee | None:
    """Bisect the highest rate with TTFT p90 ≤ GOAL_TTFT_S, to this relative precision. None if even LOWEST_RATE is too much.

    Assumes that a higher rate never helps; where that does not hold, a knee between two rates that were tried is found."""
    count = 0
    best: Summary | None = None

    def bears(rate: float) -> bool:
        nonlocal best, count
        summary = replay(pool, policy, rate=rate, limit=limit).summary
        count += 1
        if progress is not None:
            progress(summary)
        good = _or_infinite(summary.ttft_s.p90) <= GOAL_TTFT_S
        if good and (best is None or rate > best.rate):
            best = summary
        return good

    low = high = start
    if bears(start):
        while high < HIGHEST_RATE:
            high = min(high * 1.5, HIGHEST_RATE)
            if not bears(high):
                break
            low = high
    else:
        while low > LOWEST_RATE:
            low = max(low / 1.5, LOWEST_RATE)
            if bears(low):
                break
            high = low
        else:
            return None
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if bears(middle):
            low = middle
        else:
            high = middle
    return None if best is None else Knee(policy=policy, rate=best.rate, summary=best, replays=count)


def find_classic_knee(
    pool: ReplayPool,
    policy: Policy,
    *,
    limit: Ceiling,
    sweep: Sequence[ClassicWeights] = SWEEP,
    precision: float = KNEE_PRECISION,
    progress: Callable[[Summary], None] | None = None,
) -> Knee | None:
    """Find the best knee of `classic` over all weights. Weights that fail at the best rate so far are passed over."""
    best: Knee | None = None
    for weights in sweep:
        tried = replace(policy, weights=weights)
        if best is not None:
            beyond = best.rate * (1 + precision)
            summary = replay(pool, tried, rate=beyond, limit=limit).summary
            if progress is not None:
                progress(summary)
            if _or_infinite(summary.ttft_s.p90) > GOAL_TTFT_S:
                continue
            knee = find_knee(pool, tried, limit=limit, start=beyond, precision=precision, progress=progress)
        else:
            knee = find_knee(pool, tried, limit=limit, precision=precision, progress=progress)
        if knee is not None and (best is None or knee.rate > best.rate):
            best = knee
    return best


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value


# Replay of requests one after the other, without any timing: the effect of placement alone on hit rate and balance.
#
# Every request has left its worker before the next one comes, and all job events and load reports have arrived; only the
# cache changes of a request reach the routers late: after the next one is placed.

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
