"""A pool of simulated engines in virtual time, with one real router before them: aggregated, or prefill and decode apart.

The router is the scheduler that `headrace router` runs, over the real index.  The engines are the simulator's own
(`headrace.workers.sim`), stepped by a clock that jumps, and hand KV blocks over by its own fabric.  Between them
everything takes a few
milliseconds, as it does over NATS: placements, prefill jobs (pulled by token budget), hand-overs, job events, load reports,
cache events.  Nothing is random and no clock is read, so a run can be repeated exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.disagg.news import EVENT_S
from benchmarks.disagg.node import Node, Request, Served
from benchmarks.pool_world import PoolWorld
from headrace.broker.codec import parse_prefill_header, prefill_header
from headrace.broker.messages.events import EventKind, JobEvent
from headrace.broker.messages.requests import Sampling
from headrace.broker.protocol.run import BATCH_LATER
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Placement, Waiting
from headrace.workers.engine import Handover, Output, Role
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.sim.settings import SequenceFaults, SimSettings

PLACE_S = 0.003  # placement → the worker has claimed it
JOB_S = 0.004  # prefill job published → a prefill worker has it
DONE_S = 0.003  # computed → the decode worker has asked back and submits
BATCH = "batch"  # requests of this kind are of class batch
NO_FAULTS = SequenceFaults()


class World(PoolWorld):
    """`nodes`: (role, engine settings) of each worker. `run` is for once."""

    def __init__(
        self, requests: Sequence[Request], nodes: Sequence[tuple[Role, SimSettings]], settings: SchedulerSettings
    ) -> None:
        named = [(f"{role.value}-{n}", role, engine) for n, (role, engine) in enumerate(nodes)]
        super().__init__(named, settings, len(requests))
        self.prefills = [node for node in self.nodes.values() if node.role is Role.PREFILL]
        self.served = [Served(str(n), request) for n, request in enumerate(requests)]
        self.queue: deque[Served] = deque()

    def run(self, until_s: float = float("inf")) -> list[Served]:
        """Run all requests in order; what is not through by then stays as it is."""
        for served in self.served:
            self.clock.at(served.request.at_s, self._arrive, served)
        self.serve(until_s)
        return self.served

    # -- the router ----------------------------------------------------------------------------------------------------

    def _arrive(self, served: Served) -> None:
        request = served.request
        waiting = Waiting(
            id=served.id,
            key=served,
            tokens=len(request.tokens),
            max_tokens=request.output,
            chain=request.chain,
            block_size=self.block_size,
            request_class="batch" if request.kind == BATCH else "std",
            arrived_s=self.clock.now_s,
        )
        if self.router.offer(waiting, self.clock.now_s) is not None:
            self.refused()
        self.changed()

    def place(self, placement: Placement) -> None:
        served = placement.request.key
        assert isinstance(served, Served)
        served.worker = placement.worker
        # As it goes over the wire: what the worker knows is in the header.
        headers = {} if placement.prefill is None else prefill_header(placement.prefill)
        served.prefill = parse_prefill_header(headers)
        self.clock.at(self.clock.now_s + PLACE_S, self._start, served)

    def _say(self, kind: EventKind, served: Served, *, uncached: int = 0) -> None:
        request = served.request
        tokens = request.output if kind == "settled" else len(request.tokens)
        event = JobEvent(kind, served.id, 1, served.worker, tokens, uncached, len(request.chain))
        self.clock.at(self.clock.now_s + EVENT_S, self.hear, event)

    # -- the worker that owns the request ------------------------------------------------------------------------------

    def _start(self, served: Served) -> None:
        node = self.nodes[served.worker]
        node.runs += 1
        self._say("started", served)
        self.news.soon(node)
        decision = served.prefill
        if decision is None or not decision.remote:
            self._submit(node, served, None, served.request.output)
            return
        node.waits += 1
        self.clock.at(self.clock.now_s + JOB_S, self._queue_job, served, decision.worker)
        self.clock.at(self.clock.now_s + JOB_S + decision.wait_s, self._patience, served)

    def _patience(self, served: Served) -> None:
        """Compute the job here, because no prefill worker has taken it."""
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
            id=served.id,
            token_ids=tokens,
            prompt_tokens=len(tokens),
            sampling=sampling,
            priority=BATCH_LATER if served.request.kind == BATCH else 0,
            handover=handover,
        )
        node.engine.submit(sequence, NO_FAULTS)
        self.stir(node)

    def _handed_over(self, served: Served, params: Any) -> None:
        node = self.nodes[served.worker]
        node.waits -= 1
        served.ready_s = self.clock.now_s - DONE_S
        self._submit(node, served, Handover(kind="decode", params=params), served.request.output)

    # -- prefill workers -----------------------------------------------------------------------------------------------

    def _queue_job(self, served: Served, worker: str) -> None:
        (self.nodes[worker].named if worker else self.queue).append(served)
        self._pull()

    def _pull(self) -> None:
        """Give the next job to the worker that has asked first."""
        while True:
            asking = [node for node in self.prefills if node.budget.credit and (self.queue or node.named)]
            if not asking:
                return
            node = min(asking, key=lambda one: one.idle_since_s)
            served = node.named.popleft() if node.named else self.queue.popleft()
            request = served.request
            uncached = len(request.tokens) - node.manager.known(request.chain) * self.block_size
            node.budget.reserve(served.id, uncached)
            node.runs += 1
            self._submit(node, served, Handover(kind="prefill"), 1)

    # -- engines -------------------------------------------------------------------------------------------------------

    def stepped(self, node: Node, outputs: list[Output], computed: int) -> None:
        ended = False
        now_s = self.clock.now_s
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
                self.ended()
                self._say("settled", served)
        if ended or computed:
            self.news.soon(node)

    def _first(self, node: Node, served: Served, output: Output) -> None:
        served.first_s = self.clock.now_s
        self._say("prefilled", served, uncached=len(served.request.tokens) - (output.cached_tokens or 0))
        if served.ready_s >= 0:
            fetched = int((output.extra or {}).get("remote_tokens", 0))
            node.handover = (self.clock.now_s - served.ready_s, fetched)

    def _computed(self, node: Node, served: Served, output: Output) -> None:
        if output.handover is None:
            raise RuntimeError(f"request {output.id} was not handed over by {node.name}")
        node.runs -= 1
        full = not node.budget.credit
        node.budget.release(served.id)
        if full and node.budget.credit:
            node.idle_since_s = self.clock.now_s
        self.clock.at(self.clock.now_s + DONE_S, self._handed_over, served, output.handover)
        self._pull()
