"""A pool in virtual time: routers, workers and the messages between them, moved by a heap of future events.

Routers are the real scheduler over the real cache view, or anything with the same methods. Every request goes to a router drawn
at random, as pull consumers share a stream. Every message takes time: a placement until the worker has it, job events
and load reports until routers know them, and the cache changes of a step, which go as one batch after the step's end. No clock
is read and nothing is random but for the seed, so a run can be repeated exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.broker.codec import pack_u64
from headrace.broker.messages.events import EventKind, JobEvent, LoadReport
from headrace.router.errors import ReplayStalled
from headrace.router.index.types import CacheView
from headrace.router.placement.types import Placement, Shed, Waiting, WorkerInfo
from headrace.tools.replay_bench.classic import MakeRouter, Router
from headrace.tools.replay_bench.engine import EngineModel, ModelledEngine, ReplayFleet, ReplayJob
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, Trace

MOST_HASHES = 512  # in one `placed` event


def worker_name(index: int) -> str:
    return f"worker-{index}"


def worker_info(name: str, model: EngineModel, *, fleet: str = "", price: float = 0.0) -> WorkerInfo:
    return WorkerInfo(
        worker=name,
        slots=model.slots,
        blocks=model.blocks,
        block_size=BLOCK_TOKENS,
        step_tokens=model.step_tokens,
        epoch=1,
        fleet=fleet,
        price=price,
        context=model.context,
    )


def waiting_of(job: ReplayJob, *, arrived_s: float | None = None, deadline_s: float = float("inf")) -> Waiting:
    """Describe a request as a router reads it from its envelope, without the length of its answer.

    It arrives when the trace says so, unless `arrived_s` is given; `deadline_s` counts from then.
    """
    request = job.request
    arrived_s = request.at_s if arrived_s is None else arrived_s
    return Waiting(
        id=str(job.index),
        key=job.index,
        tokens=request.tokens,
        chain=request.chain,
        block_size=BLOCK_TOKENS,
        request_class=request.request_class,
        tenant=request.tenant,
        ttft_target_s=request.ttft_target_s,
        arrived_s=arrived_s,
        deadline_s=arrived_s + deadline_s,
    )


def job_event(kind: EventKind, job: ReplayJob, worker: str) -> JobEvent:
    """Make a job event. `settled` has the tokens of the answer, the others those of the prompt."""
    request = job.request
    tokens = request.output if kind == "settled" else request.tokens
    return JobEvent(kind, str(job.index), 1, worker, tokens=tokens, uncached=job.uncached, blocks=len(request.chain))


def placed_event(placement: Placement, by: str) -> JobEvent:
    """Make the event by which other routers learn of a placement."""
    request = placement.request
    return JobEvent(
        "placed",
        request.id,
        request.attempt,
        placement.worker,
        tokens=request.tokens,
        uncached=placement.uncached,
        blocks=len(request.chain),
        by=by,
        hashes=pack_u64(placement.new_blocks[:MOST_HASHES]),
    )


def load_report(engine: ModelledEngine, worker: str, *, n: int, now_s: float) -> LoadReport:
    return LoadReport(
        worker=worker,
        epoch=1,
        n=n,
        at=now_s,
        slots=engine.model.slots,
        running=engine.running + engine.waiting,  # all it has, as a worker counts
        waiting=engine.waiting,
        # The engine model has no limit of KV memory, so it reports no blocks.
        queued_prefill_tokens=engine.prompt_tokens_left(now_s),
        step_s=engine.step_s,
        step_prefill_tokens=engine.step_prefill_tokens,
        step_decodes=engine.step_decodes,
    )


def apply_changes(view: CacheView, worker: str, *, stored: Sequence[int], removed: Sequence[int], now_s: float) -> None:
    view.apply(
        worker,
        removed={"device": removed} if removed else {},
        stored={"device": stored} if stored else {},
        now_s=now_s,
    )


def job_index(request: Waiting) -> int:
    return int(request.id)


STALL_S = 600.0  # a replay in which nothing has moved for so long has come to a halt
WAKE_AGAIN_S = 0.001  # a scheduler that wants to be woken at once gets this much later


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Delays of messages, in seconds."""

    place_s: float = 0.001  # placement → worker
    event_s: float = 0.001  # job event or load report → router
    kv_s: float = 0.002  # cache changes → router, after the end of their step
    report_s: float = 0.02  # least time between load reports of a worker
    heartbeat_s: float = 0.2  # most time between load reports of a worker


@dataclass(slots=True, kw_only=True)
class ReplayOutcome:
    job: ReplayJob
    router: int = -1
    placed_s: float = -1.0
    predicted_ttft_s: float = -1.0
    predicted_uncached: int = -1
    reason: str = ""
    fleet: str = ""  # where there is a choice
    shed: str = ""  # the code of its refusal, if it was shed


@dataclass(slots=True)
class _Clocked:
    router: Router
    dirty: bool = False
    wake_s: float = float("inf")
    decisions: int = 0


@dataclass(slots=True)
class _Reporting:
    n: int = 0
    last_s: float = float("-inf")
    due: bool = False  # a report is on the way


@dataclass(slots=True, kw_only=True)
class World:
    """Simulates a pool. `run` replays a trace once; a world is used once."""

    trace: Trace
    fleets: tuple[ReplayFleet, ...]
    make_router: MakeRouter
    routers: int = 1
    seed: int = 0
    deadline_s: float = float("inf")  # for every request, from its arrival
    delays: Delays = field(default_factory=Delays)

    _heap: list[tuple[float, int, Callable[..., None], Any]] = field(default_factory=list, init=False)
    _pushed: int = field(default=0, init=False)
    _now_s: float = field(default=0.0, init=False)
    _moved_s: float = field(default=0.0, init=False)
    _open: int = field(default=0, init=False)
    _engines: list[ModelledEngine] = field(default_factory=list, init=False)
    _reporting: list[_Reporting] = field(default_factory=list, init=False)
    _step_of: list[int] = field(default_factory=list, init=False)  # per worker: number of the end of step that counts
    _clocked: list[_Clocked] = field(default_factory=list, init=False)
    _outcomes: list[ReplayOutcome] = field(default_factory=list, init=False)
    _names: list[str] = field(default_factory=list, init=False)
    _worker_of: dict[str, int] = field(default_factory=dict, init=False)

    def run(self) -> list[ReplayOutcome]:
        """Replay all requests, and return their outcomes in the order of the trace. Raises ReplayStalled if placing stops."""
        self._begin()
        heap = self._heap
        while self._open:
            self._now_s = now_s = heap[0][0]
            if now_s - self._moved_s > STALL_S and self._stalled():
                raise ReplayStalled(
                    f"at {now_s:.1f} s of the replay {self._open} requests are open and nothing has moved for {STALL_S:g} s"
                )
            while heap and heap[0][0] <= now_s:
                _, _, act, subject = heapq.heappop(heap)
                act(subject)
            for clocked in self._clocked:
                if clocked.dirty:
                    self._decide(clocked)
        return self._outcomes

    @property
    def decisions(self) -> int:
        """The number of times that routers were asked to decide."""
        return sum(c.decisions for c in self._clocked)

    def _stalled(self) -> bool:
        return all(engine.idle for engine in self._engines) and any(c.router.scheduler.waiting for c in self._clocked)

    # Setup.

    def _begin(self) -> None:
        rng = random.Random(f"deal {self.seed}")  # noqa: S311 - reproducible, not secret
        members = [fleet for fleet in self.fleets for _ in range(fleet.workers)]
        self._engines = [ModelledEngine(fleet.model, index=n) for n, fleet in enumerate(members)]
        self._reporting = [_Reporting() for _ in self._engines]
        self._step_of = [0] * len(members)
        self._names = [worker_name(n) for n in range(len(members))]
        self._worker_of = {name: n for n, name in enumerate(self._names)}
        self._clocked = [_Clocked(self.make_router(f"router-{n}", self.seed * 1000 + n)) for n in range(self.routers)]
        for clocked in self._clocked:
            clocked.router.scheduler.set_routers(c.router.name for c in self._clocked)
            for name, fleet in zip(self._names, members, strict=True):
                clocked.router.view.add_worker(name, capacity_blocks=fleet.model.blocks)
                info = worker_info(name, fleet.model, fleet=fleet.name, price=fleet.price)
                clocked.router.scheduler.put_worker(info, 0.0)
        self._open = len(self.trace.requests)
        for index, request in enumerate(self.trace.requests):
            outcome = ReplayOutcome(job=ReplayJob(index=index, request=request), router=rng.randrange(self.routers))
            self._outcomes.append(outcome)
            self._at(request.at_s, self._arrive, outcome)
        for engine in self._engines:
            self._at(0.0, self._report, engine)

    def _at(self, at_s: float, act: Callable[..., None], subject: object) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at_s, self._pushed, act, subject))

    # Requests and routers.

    def _arrive(self, outcome: ReplayOutcome) -> None:
        clocked = self._clocked[outcome.router]
        clocked.dirty = True
        shed = clocked.router.scheduler.offer(waiting_of(outcome.job, deadline_s=self.deadline_s), self._now_s)
        if shed is not None:
            self._shed(shed)
        self._moved_s = self._now_s

    def _decide(self, clocked: _Clocked) -> None:
        clocked.dirty = False
        scheduler, now_s = clocked.router.scheduler, self._now_s
        if not scheduler.waiting:
            return
        clocked.decisions += 1
        for decision in scheduler.decide(now_s):
            if isinstance(decision, Shed):
                self._shed(decision)
            else:
                self._place(decision, clocked.router.name)
        if not scheduler.waiting:
            return
        wake_s = scheduler.next_wake_s(now_s)
        if wake_s is None:
            return
        wake_s = max(wake_s, now_s + WAKE_AGAIN_S)
        if wake_s < clocked.wake_s:
            clocked.wake_s = wake_s
            self._at(wake_s, self._wake, (clocked, wake_s))

    def _wake(self, subject: tuple[_Clocked, float]) -> None:
        clocked, wake_s = subject
        if clocked.wake_s == wake_s:
            clocked.wake_s = float("inf")
            clocked.dirty = True

    def _place(self, placement: Placement, by: str) -> None:
        outcome = self._outcomes[job_index(placement.request)]
        outcome.placed_s = self._moved_s = self._now_s
        outcome.predicted_ttft_s = placement.predicted_ttft_s
        outcome.predicted_uncached = placement.uncached
        outcome.reason = placement.reason
        outcome.fleet = placement.fleet.fleet if placement.fleet is not None else ""
        self._at(self._now_s + self.delays.place_s, self._submit, (outcome.job, self._worker_of[placement.worker]))
        if self.routers > 1:
            self._at(self._now_s + self.delays.event_s, self._deliver_event, placed_event(placement, by))

    def _shed(self, shed: Shed) -> None:
        self._outcomes[job_index(shed.request)].shed = shed.code
        self._open -= 1
        self._moved_s = self._now_s

    # Workers.

    def _submit(self, subject: tuple[ReplayJob, int]) -> None:
        job, worker = subject
        engine = self._engines[worker]
        ends_s = engine.step_ends_s
        engine.submit(job, self._now_s)
        self._send_event("started", job)
        self._report_soon(engine)
        if engine.step_ends_s != ends_s:
            self._await_step(engine)

    def _await_step(self, engine: ModelledEngine) -> None:
        if engine.step_ends_s is not None:
            self._step_of[engine.index] += 1
            self._at(engine.step_ends_s, self._end_step, (engine, self._step_of[engine.index]))

    def _end_step(self, subject: tuple[ModelledEngine, int]) -> None:
        engine, number = subject
        if number != self._step_of[engine.index]:
            return  # an arrival has cut the steps short, and that end came before
        computed = engine.step_prefill_tokens
        step = engine.end_step(self._now_s)
        self._moved_s = self._now_s
        for job in step.prefilled:
            self._send_event("prefilled", job)
        for job in step.settled:
            self._send_event("settled", job)
            self._open -= 1
        if step.stored or step.removed:
            self._at(self._now_s + self.delays.kv_s, self._apply, (engine.index, step.stored, step.removed))
        if computed or step.settled:
            self._report_soon(engine)
        self._await_step(engine)

    # Events and reports.

    def _send_event(self, kind: EventKind, job: ReplayJob) -> None:
        self._at(self._now_s + self.delays.event_s, self._deliver_event, job_event(kind, job, self._names[job.worker]))

    def _deliver_event(self, event: JobEvent) -> None:
        for clocked in self._clocked:
            if event.by != clocked.router.name:
                clocked.router.scheduler.on_event(event, self._now_s)
                clocked.dirty = True

    def _apply(self, subject: tuple[int, Sequence[int], Sequence[int]]) -> None:
        worker, stored, removed = subject
        for clocked in self._clocked:
            apply_changes(clocked.router.view, self._names[worker], stored=stored, removed=removed, now_s=self._now_s)
            clocked.dirty = True

    def _report_soon(self, engine: ModelledEngine) -> None:
        """Report a changed load, but not too often."""
        reporting = self._reporting[engine.index]
        if not reporting.due:
            reporting.due = True
            self._at(max(self._now_s, reporting.last_s + self.delays.report_s), self._report_change, engine)

    def _report_change(self, engine: ModelledEngine) -> None:
        self._reporting[engine.index].due = False
        self._send_report(engine)

    def _report(self, engine: ModelledEngine) -> None:
        reporting = self._reporting[engine.index]
        if self._now_s - reporting.last_s >= self.delays.heartbeat_s - 1e-9:
            self._send_report(engine)
        self._at(reporting.last_s + self.delays.heartbeat_s, self._report, engine)

    def _send_report(self, engine: ModelledEngine) -> None:
        reporting = self._reporting[engine.index]
        reporting.n += 1
        reporting.last_s = self._now_s
        report = load_report(engine, self._names[engine.index], n=reporting.n, now_s=self._now_s)
        self._at(self._now_s + self.delays.event_s, self._deliver_report, report)

    def _deliver_report(self, report: LoadReport) -> None:
        for clocked in self._clocked:
            clocked.router.scheduler.on_report(report, self._now_s)
            clocked.dirty = True
