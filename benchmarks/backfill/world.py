"""A pool of simulated engines in virtual time that serves interactive requests and a file of batch requests beside them.

Scheduler, prefix index and the choice of preempted runs are those of routers and workers; the engines are the simulator's own,
stepped by a clock that jumps.  Between them everything takes the few milliseconds that it takes over NATS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.backfill.reports import Reports
from benchmarks.disagg.news import News
from benchmarks.disagg.node import Node, Request
from benchmarks.pool_world import PoolWorld
from headrace.broker.messages.events import EventKind, JobEvent
from headrace.broker.messages.requests import Envelope, Sampling
from headrace.broker.protocol.preemption import choose, may_yield
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.settings import SessionSettings
from headrace.jetstream.ports import Delivery
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Placement, Waiting
from headrace.router.settings import SessionOptions
from headrace.workers.engine import Output, Role
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.sim.settings import SequenceFaults, SimSettings

PLACE_S = 0.003  # placement → the worker has it
EVENT_S = 0.001
MOVE_S = 0.004  # preempted → a router has the next attempt
MOST_PREEMPTIONS = SessionSettings().max_preemptions
BATCH_WINDOW = SessionOptions().batch_window
NO_FAULTS = SequenceFaults()


@dataclass(slots=True)
class Served:
    """Times of a request, in seconds, -1 = never."""

    id: str
    request: Request
    attempt: int = 1
    worker: str = ""
    kept: bool = False
    emitted: list[int] = field(default_factory=list)
    run: Run | None = None
    first_s: float = -1.0
    ended_s: float = -1.0
    began_s: float = -1.0
    held_s: float = 0.0  # seconds of slots
    computed: int = 0  # prompt tokens that were not in a cache, of all attempts
    preempted: int = 0

    @property
    def batch(self) -> bool:
        return self.request.kind == "batch"

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.at_s


class World(PoolWorld):
    """`interactive` come at their times; `batch` is a file of which the router's window is kept full. `run` is for once."""

    def __init__(
        self,
        interactive: Sequence[Request],
        batch: Sequence[Request],
        engines: Sequence[SimSettings],
        settings: SchedulerSettings,
    ) -> None:
        nodes = [(f"w{number}", Role.AGGREGATED, engine) for number, engine in enumerate(engines)]
        super().__init__(nodes, settings, len(interactive) + len(batch))
        self.served = [Served(str(n), request) for n, request in enumerate([*interactive, *batch])]
        self.interactive = self.served[: len(interactive)]
        self.batch = self.served[len(interactive) :]
        self._file = deque(self.batch)
        self._pulled = 0  # batch requests in the router's window
        self.runs: dict[str, dict[str, Served]] = {name: {} for name in self.nodes}

    def make_news(self) -> News:
        self._reports = Reports(self.clock, self.router, self.view, self.changed)
        return self._reports

    def run(self, until_s: float = float("inf")) -> None:
        """Serve until everything has ended or the time is over."""
        for served in self.interactive:
            self.clock.at(served.request.at_s, self._arrive, served)
        self._pull()
        self.serve(until_s)
        for running in self.runs.values():
            for served in running.values():
                served.held_s += self.clock.now_s - served.began_s

    def held_s(self, *, batch: bool) -> float:
        """Return the seconds of slots that requests of a kind have had so far."""
        now_s = self.clock.now_s
        running = [one for runs in self.runs.values() for one in runs.values() if one.batch == batch]
        ended = self.batch if batch else self.interactive
        return sum(one.held_s for one in ended) + sum(now_s - one.began_s for one in running)

    # -- the router ----------------------------------------------------------------------------------------------------

    def _pull(self) -> None:
        while self._file and self._pulled < BATCH_WINDOW:
            self._pulled += 1
            self._arrive(self._file.popleft())

    def _arrive(self, served: Served) -> None:
        request, now_s = served.request, self.clock.now_s
        request_class = ("rb" if served.attempt > 1 else "batch") if served.batch else "std"
        waiting = Waiting(
            id=served.id,
            key=served,
            attempt=served.attempt,
            tokens=len(request.tokens),
            max_tokens=request.output,
            chain=request.chain,
            block_size=self.block_size,
            request_class=request_class,
            tenant="files" if served.batch else "people",
            arrived_s=now_s,
        )
        if self.router.offer(waiting, now_s) is not None:
            self.refused()
        self.changed()

    def place(self, placement: Placement) -> None:
        served = placement.request.key
        assert isinstance(served, Served)
        served.worker, served.kept = placement.worker, placement.kept
        if served.batch and served.attempt == 1:
            self._pulled -= 1
            self._pull()
        self.clock.at(self.clock.now_s + PLACE_S, self._start, served)

    def _say(self, kind: EventKind, served: Served, tokens: int, *, uncached: int = 0) -> None:
        event = JobEvent(kind, served.id, served.attempt, served.worker, tokens, uncached)
        self.clock.at(self.clock.now_s + EVENT_S, self.hear, event)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _start(self, served: Served) -> None:
        node, running = self.nodes[served.worker], self.runs[served.worker]
        served.run = run = make_run(served)
        served.began_s = self.clock.now_s
        running[served.id] = served
        over = len(running) - node.engine.settings.slots
        if over > 0:
            candidates = [one.run for one in running.values() if one.run is not None and may_yield(one.run, MOST_PREEMPTIONS)]
            for victim in choose(candidates, slots=over, blocks=0, block_size=1, resumable=lambda _: True):
                self._preempt(node, running[victim.id])
        if run.state is RunState.WAITING:
            run.begin([served.emitted], [])
            run.start()
            tokens = served.request.tokens + served.emitted
            sampling = Sampling(max_tokens=served.request.output - len(served.emitted))
            node.engine.submit(
                EngineSequence(
                    id=served.id,
                    token_ids=tokens,
                    prompt_tokens=len(served.request.tokens),
                    sampling=sampling,
                    priority=run.engine_priority,
                ),
                NO_FAULTS,
            )
            self._say("started", served, len(served.request.tokens))
            self.stir(node)
        self._note(node)

    def _preempt(self, node: Node, served: Served) -> None:
        assert served.run is not None
        served.emitted = list(served.run.choices[0].ids) if served.run.choices else served.emitted
        served.run.move()
        node.engine.abort([served.id])
        self._leave(served)
        self._say("moved", served, len(served.request.tokens))
        served.attempt += 1
        served.preempted += 1
        self.clock.at(self.clock.now_s + MOVE_S, self._arrive, served)

    def _leave(self, served: Served) -> None:
        del self.runs[served.worker][served.id]
        served.held_s += self.clock.now_s - served.began_s

    def _note(self, node: Node) -> None:
        """Say in the next load report what this worker has."""
        running = self.runs[node.name]
        node.runs = len(running)
        runs = [one.run for one in running.values() if one.run is not None]
        self._reports.batch[node.name] = sum(one.batch for one in running.values())
        self._reports.yielding[node.name] = sum(may_yield(run, MOST_PREEMPTIONS) for run in runs)
        self._reports.soon(node)

    # -- engines -------------------------------------------------------------------------------------------------------

    def stepped(self, node: Node, outputs: list[Output], computed: int) -> None:
        ended = False
        running = self.runs[node.name]
        for output in outputs:
            served = running.get(output.id)
            if served is None or served.run is None:
                continue  # preempted in this step
            if not served.run.made:
                self._first(served, output)
            served.run.append(0, output.ids, [""] * len(output.ids), None, None)
            if output.finish is not None:
                ended = True
                served.ended_s = self.clock.now_s
                self._leave(served)
                self.ended()
                self._say("settled", served, served.request.output)
        if ended or computed:
            self._note(node)

    def _first(self, served: Served, output: Output) -> None:
        if served.first_s < 0:
            served.first_s = self.clock.now_s
        uncached = len(served.request.tokens) + len(served.emitted) - (output.cached_tokens or 0)
        served.computed += uncached
        self._say("prefilled", served, len(served.request.tokens), uncached=uncached)


def make_run(served: Served) -> Run:
    """Make the run of an attempt as its worker has it."""
    envelope = Envelope(
        id=served.id,
        pool="p",
        model="m",
        judge="j",
        deadline=float("inf"),
        created=0.0,
        tokens=len(served.request.tokens),
        request_class="batch" if served.batch else "std",
    )
    run = Run(envelope=envelope, attempt=served.attempt, history=[], run=served.attempt, delivery=_NOT_STORED)
    run.kept = served.kept
    return run


class _NotStored:
    """A delivery of no stored message."""

    stream_seq = num_delivered = 1
    data = b""
    subject = ""
    pending = 0
    headers = None

    def ack(self) -> None: ...
    def nak(self, delay_s: float = 0.0) -> None: ...
    def progress(self) -> None: ...
    def term(self, reason: str = "") -> None: ...


_NOT_STORED: Delivery = _NotStored()
