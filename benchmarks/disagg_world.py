"""A pool of simulated engines in virtual time, with one real router before them: aggregated, or prefill and decode apart.

The router is the scheduler that `headrace router` runs, over the real index.  The engines are the simulator's own
(`workers.sim`), stepped by a clock that jumps, and hand KV blocks over by its own fabric.  Between them everything takes a few
milliseconds, as it does over NATS: placements, prefill jobs (pulled by token budget), hand-overs, job events, load reports,
cache events.  Nothing is random and no clock is read, so a run can be repeated exactly.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.codec import parse_prefill_header, prefill_header
from broker.messages import EventKind, JobEvent, LoadReport, PrefillDecision, Sampling
from broker.prefill.budget import TokenBudget
from router.index.create import create_index
from router.index.view import Caches
from router.placement.scheduler import Scheduler as Router
from router.placement.settings import SchedulerSettings
from router.placement.types import Placement, Shed, Waiting, WorkerInfo
from workers.engine import Handover, KvEvent, Output, Role
from workers.engine import Sequence as EngineSequence
from workers.sim.fabric import LocalFabric
from workers.sim.faults import SequenceFaults
from workers.sim.membership import FabricMember
from workers.sim.scheduler import Scheduler as SimScheduler
from workers.sim.scheduler import block_manager
from workers.sim.settings import SimSettings
from workers.sim.tokens import bundled_vocabulary
from workers.sim.wire import Wire

PLACE_S = 0.003  # placement → the worker has claimed it
JOB_S = 0.004  # prefill job published → a prefill worker has it
DONE_S = 0.003  # computed → the decode worker has asked back and submits
EVENT_S = 0.001
KV_S = 0.002
REPORT_S, HEARTBEAT_S = 0.02, 0.2  # load reports are at least and at most so far apart
NO_FAULTS = SequenceFaults()


@dataclass(slots=True)
class Request:
    """One of the workload; `kind` tells its sort apart in the figures."""

    at_s: float
    kind: str
    tokens: list[int]
    chain: list[int]
    output: int


@dataclass(slots=True)
class Served:
    """What became of a request. Times in seconds, -1 = never."""

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
    """One worker: an engine and what its runtime keeps."""

    def __init__(self, world: World, name: str, role: Role, settings: SimSettings) -> None:
        self.name = name
        self.role = role
        self.world = world
        manager = block_manager(settings)
        wire = None
        if settings.hands_over(role):
            wire = Wire(
                model="m",
                role=role,
                settings=settings,
                timing=settings.timing_model(),
                manager=manager,
                clock=lambda: world.now_s,
            )
        self.engine = SimScheduler(settings, bundled_vocabulary(), manager=manager, clock=lambda: world.now_s, wire=wire)
        if wire is not None:
            FabricMember(wire, self.engine, world.fabric, name, wake=lambda: world.stir(self))
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


class World:
    """`nodes`: (role, engine settings) of each worker. `run` is for once."""

    def __init__(
        self, requests: Sequence[Request], nodes: Sequence[tuple[Role, SimSettings]], settings: SchedulerSettings
    ) -> None:
        self.now_s = 0.0
        self.fabric = LocalFabric()
        self.view = Caches(create_index())
        self.router = Router(settings, self.view, name="r")
        self.nodes = {}
        for n, (role, engine) in enumerate(nodes):
            name = f"{role.value}-{n}"
            self.nodes[name] = node = Node(self, name, role, engine)
            self.view.add_worker(name, capacity_blocks=engine.blocks)
            self.router.put_worker(node.info(engine), 0.0)
        self.prefills = [node for node in self.nodes.values() if node.role is Role.PREFILL]
        self.served = [Served(str(n), request) for n, request in enumerate(requests)]
        self.queue: deque[Served] = deque()
        self.shed = 0
        self.steps = 0
        self._open = len(self.served)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._wake_s = float("inf")
        self._dirty = False

    def run(self, until_s: float = float("inf")) -> list[Served]:
        """All requests in order; what is not through by then stays as it is."""
        for served in self.served:
            self._at(served.request.at_s, self._arrive, served)
        for node in self.nodes.values():
            self._at(0.0, self._heartbeat, node)
        while self._open and self._heap[0][0] <= until_s:
            self.now_s = now_s = self._heap[0][0]
            while self._heap and self._heap[0][0] <= now_s:
                _, _, act, args = heapq.heappop(self._heap)
                act(*args)
            if self._dirty:
                self._decide()
        return self.served

    def _at(self, at_s: float, act: Callable[..., None], *args: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at_s, self._pushed, act, args))

    # -- the router ----------------------------------------------------------------------------------------------------

    def _arrive(self, served: Served) -> None:
        request = served.request
        waiting = Waiting(
            id=served.id,
            key=served,
            tokens=len(request.tokens),
            max_tokens=request.output,
            chain=request.chain,
            block_size=self._block_size,
            arrived_s=self.now_s,
        )
        if self.router.offer(waiting, self.now_s) is not None:
            self._lost()
        self._dirty = True

    @property
    def _block_size(self) -> int:
        return next(iter(self.nodes.values())).engine.settings.block_size

    def _lost(self) -> None:
        self.shed += 1
        self._open -= 1

    def _decide(self) -> None:
        self._dirty = False
        if not self.router.waiting:
            return
        for decision in self.router.decide(self.now_s):
            if isinstance(decision, Shed):
                self._lost()
            else:
                self._place(decision)
        wake_s = self.router.next_wake_s(self.now_s)
        if wake_s is not None and wake_s < self._wake_s:
            self._wake_s = max(wake_s, self.now_s + 0.001)
            self._at(self._wake_s, self._wake, self._wake_s)

    def _wake(self, wake_s: float) -> None:
        if wake_s == self._wake_s:
            self._wake_s = float("inf")
            self._dirty = True

    def _place(self, placement: Placement) -> None:
        served = placement.request.key
        assert isinstance(served, Served)
        served.worker = placement.worker
        # As it goes over the wire: what the worker knows is in the header.
        headers = {} if placement.prefill is None else prefill_header(placement.prefill)
        served.prefill = parse_prefill_header(headers)
        self._at(self.now_s + PLACE_S, self._start, served)

    def _hear(self, event: JobEvent) -> None:
        self.router.on_event(event, self.now_s)
        self._dirty = True

    def _say(self, kind: EventKind, served: Served, *, uncached: int = 0) -> None:
        request = served.request
        tokens = request.output if kind == "settled" else len(request.tokens)
        event = JobEvent(kind, served.id, 1, served.worker, tokens, uncached, len(request.chain))
        self._at(self.now_s + EVENT_S, self._hear, event)

    # -- the worker that owns the request ------------------------------------------------------------------------------

    def _start(self, served: Served) -> None:
        node = self.nodes[served.worker]
        node.runs += 1
        self._say("started", served)
        self._news(node)
        decision = served.prefill
        if decision is None or not decision.remote:
            self._submit(node, served, None, served.request.output)
            return
        node.waits += 1
        self._at(self.now_s + JOB_S, self._queue_job, served, decision.worker)
        self._at(self.now_s + JOB_S + decision.wait_s, self._patience, served)

    def _patience(self, served: Served) -> None:
        """Nobody has taken the job: it is computed here."""
        for queue in (self.queue, *(node.named for node in self.prefills)):
            if served in queue:
                queue.remove(served)
                served.fell_back = True
                node = self.nodes[served.worker]
                node.waits -= 1
                self._submit(node, served, None, served.request.output)

    def _submit(self, node: Node, served: Served, handover: Handover | None, max_tokens: int) -> None:
        tokens = served.request.tokens
        sampling = Sampling(max_tokens=max_tokens)
        sequence = EngineSequence(
            id=served.id, token_ids=tokens, prompt_tokens=len(tokens), sampling=sampling, handover=handover
        )
        node.engine.submit(sequence, NO_FAULTS)
        self.stir(node)

    def _handed_over(self, served: Served, params: Any) -> None:
        node = self.nodes[served.worker]
        node.waits -= 1
        served.ready_s = self.now_s - DONE_S
        self._submit(node, served, Handover(kind="decode", params=params), served.request.output)

    # -- prefill workers -----------------------------------------------------------------------------------------------

    def _queue_job(self, served: Served, worker: str) -> None:
        (self.nodes[worker].named if worker else self.queue).append(served)
        self._pull()

    def _pull(self) -> None:
        """Who has asked first gets the next job."""
        while True:
            asking = [node for node in self.prefills if node.budget.credit and (self.queue or node.named)]
            if not asking:
                return
            node = min(asking, key=lambda one: one.idle_since_s)
            served = node.named.popleft() if node.named else self.queue.popleft()
            request = served.request
            uncached = len(request.tokens) - node.manager.known(request.chain) * self._block_size
            node.budget.take(served.id, uncached)
            node.runs += 1
            self._submit(node, served, Handover(kind="prefill"), 1)

    # -- engines -------------------------------------------------------------------------------------------------------

    def stir(self, node: Node) -> None:
        """There may be something to do for its engine."""
        if not node.busy and node.wake_s > self.now_s:
            node.wake_s = self.now_s
            self._at(self.now_s, self._step, node, self.now_s)

    def _step(self, node: Node, wake_s: float) -> None:
        if node.busy or node.wake_s != wake_s:
            return
        node.wake_s = float("inf")
        result = node.engine.step()
        if result is None:
            self._tell_cache(node, node.manager.take_events(), 0.0)
            at_s = node.engine.next_at()
            if at_s is not None:
                node.wake_s = max(at_s, self.now_s)
                self._at(node.wake_s, self._step, node, node.wake_s)
            return
        self.steps += 1
        node.busy = True
        node.step_ends_s = self.now_s + result.duration_s
        node.busy_s += result.duration_s
        self._tell_cache(node, result.events, result.duration_s)
        self._at(self.now_s + result.duration_s, self._stepped, node, result.outputs, result.prefill_tokens)

    def _stepped(self, node: Node, outputs: list[Output], computed: int) -> None:
        node.busy = False
        ended = False
        now_s = self.now_s
        for output in outputs:
            served = self.served[int(output.id)]
            if output.fault is not None:
                raise RuntimeError(f"request {output.id} failed on {node.name}: {output.fault.message}")
            if node.role is Role.PREFILL:
                self._computed(node, served, output)
                ended = True
                continue
            if served.first_s < 0:
                self._first(node, served, output)
            else:
                served.gaps.append(now_s - served.last_s)
            served.last_s = now_s
            if output.finish is not None:
                ended = True
                node.runs -= 1
                self._open -= 1
                self._say("settled", served)
        if ended or computed:
            self._news(node)
        self.stir(node)

    def _first(self, node: Node, served: Served, output: Output) -> None:
        served.first_s = self.now_s
        self._say("prefilled", served, uncached=len(served.request.tokens) - (output.cached_tokens or 0))
        if served.ready_s >= 0:
            fetched = int((output.extra or {}).get("remote_tokens", 0))
            node.handover = (self.now_s - served.ready_s, fetched)

    def _computed(self, node: Node, served: Served, output: Output) -> None:
        if output.handover is None:
            raise RuntimeError(f"request {output.id} was not handed over by {node.name}")
        node.runs -= 1
        full = not node.budget.credit
        node.budget.give_back(served.id)
        if full and node.budget.credit:
            node.idle_since_s = self.now_s
        self._at(self.now_s + DONE_S, self._handed_over, served, output.handover)
        self._pull()

    # -- what workers tell ---------------------------------------------------------------------------------------------

    def _tell_cache(self, node: Node, events: Sequence[KvEvent], after_s: float) -> None:
        if events:
            self._at(self.now_s + after_s + KV_S, self._apply, node.name, events)

    def _apply(self, name: str, events: Sequence[KvEvent]) -> None:
        for event in events:
            blocks = {event.tier: list(event.hashes)}
            stored = event.kind == "stored"
            self.view.apply(name, removed={} if stored else blocks, stored=blocks if stored else {}, now_s=self.now_s)
        self._dirty = True

    def _news(self, node: Node) -> None:
        if not node.report_due:
            node.report_due = True
            self._at(max(self.now_s, node.reported_s + REPORT_S), self._report, node)

    def _heartbeat(self, node: Node) -> None:
        if self.now_s - node.reported_s >= HEARTBEAT_S - 1e-9:
            self._report(node)
        self._at(node.reported_s + HEARTBEAT_S, self._heartbeat, node)

    def _report(self, node: Node) -> None:
        node.report_due = False
        node.reports += 1
        node.reported_s = self.now_s
        load = node.engine.load(node.step_ends_s - self.now_s if node.busy else 0.0)
        report = LoadReport(
            worker=node.name,
            epoch=1,
            n=node.reports,
            at=self.now_s,
            slots=node.engine.settings.slots,
            running=node.runs,
            waiting=load.waiting,
            blocks_total=load.blocks_total,
            blocks_used=load.blocks_used,
            queued_prefill_tokens=load.queued_prefill_tokens,
            step_s=load.step_s,
            step_prefill_tokens=load.step_prefill_tokens,
            step_decodes=load.step_decodes,
            handover_s=node.handover[0],
            handover_tokens=node.handover[1],
        )
        self._at(self.now_s + EVENT_S, self._hear_report, report)

    def _hear_report(self, report: LoadReport) -> None:
        self.router.on_report(report, self.now_s)
        self._dirty = True
