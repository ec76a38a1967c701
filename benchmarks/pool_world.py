"""Runs one real router and the steps of simulated engines in virtual time: what all simulated pools share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from benchmarks.disagg.news import News
from benchmarks.disagg.node import Node
from benchmarks.virtual_clock import VirtualClock
from headrace.broker.messages.events import JobEvent
from headrace.router.index.view import Caches, create_index
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Placement, Shed
from headrace.workers.engine import Output, Role
from headrace.workers.sim.fabric import LocalFabric
from headrace.workers.sim.settings import SimSettings


class PoolWorld(ABC):
    """A pool of simulated workers behind one scheduler. A subclass brings the requests, starts them and hears their tokens."""

    def __init__(self, nodes: Sequence[tuple[str, Role, SimSettings]], settings: SchedulerSettings, requests: int) -> None:
        """`nodes`: name, role and engine of each worker. `requests`: how many are to end."""
        self.clock = VirtualClock()
        self.view = Caches(create_index())
        self.router = Scheduler(settings, self.view, name="r")
        self.news = self.make_news()
        self.nodes: dict[str, Node] = {}
        fabric = LocalFabric()
        for name, role, engine in nodes:
            self.nodes[name] = node = Node(name, role, engine, fabric=fabric, clock=lambda: self.clock.now_s, stir=self.stir)
            self.view.add_worker(name, capacity_blocks=engine.blocks)
            self.router.put_worker(node.info(engine), 0.0)
        self.shed = 0
        self.steps = 0
        self._open = requests
        self._wake_s = float("inf")
        self._dirty = False

    def make_news(self) -> News:
        """Make what tells the router of the workers."""
        return News(self.clock, self.router, self.view, self.changed)

    @abstractmethod
    def place(self, placement: Placement) -> None:
        """Carry a placement out."""

    @abstractmethod
    def stepped(self, node: Node, outputs: list[Output], computed: int) -> None:
        """Take the outputs of a step that has ended, with the number of prompt tokens that it computed."""

    def serve(self, until_s: float) -> None:
        """Serve until every request has ended or the time is over."""
        for node in self.nodes.values():
            self.clock.at(0.0, self.news.heartbeat, node)
        while self._open and self.clock.next_s <= until_s:
            self.clock.jump()
            if self._dirty:
                self._decide()

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return next(iter(self.nodes.values())).engine.settings.block_size

    # -- the router ----------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Let the router decide after this event."""
        self._dirty = True

    def ended(self) -> None:
        """Count a request that has ended."""
        self._open -= 1

    def refused(self) -> None:
        """Count a request that was refused."""
        self.shed += 1
        self._open -= 1

    def hear(self, event: JobEvent) -> None:
        """Tell the router of a job event."""
        self.router.on_event(event, self.clock.now_s)
        self.changed()

    def _decide(self) -> None:
        self._dirty = False
        if not self.router.waiting:
            return
        for decision in self.router.decide(self.clock.now_s):
            if isinstance(decision, Shed):
                self.refused()
            else:
                self.place(decision)
        wake_s = self.router.next_wake_s(self.clock.now_s)
        if wake_s is not None and wake_s < self._wake_s:
            self._wake_s = max(wake_s, self.clock.now_s + 0.001)
            self.clock.at(self._wake_s, self._wake, self._wake_s)

    def _wake(self, wake_s: float) -> None:
        if wake_s == self._wake_s:
            self._wake_s = float("inf")
            self.changed()

    # -- engines -------------------------------------------------------------------------------------------------------

    def stir(self, node: Node) -> None:
        """Look whether there is something to do for the engine of this node."""
        if not node.busy and node.wake_s > self.clock.now_s:
            node.wake_s = self.clock.now_s
            self.clock.at(self.clock.now_s, self._step, node, self.clock.now_s)

    def _step(self, node: Node, wake_s: float) -> None:
        if node.busy or node.wake_s != wake_s:
            return
        node.wake_s = float("inf")
        result = node.engine.step()
        if result is None:
            self.news.cache(node, node.manager.take_events(), 0.0)
            at_s = node.engine.next_at()
            if at_s is not None:
                node.wake_s = max(at_s, self.clock.now_s)
                self.clock.at(node.wake_s, self._step, node, node.wake_s)
            return
        self.steps += 1
        node.busy = True
        node.step_ends_s = self.clock.now_s + result.duration_s
        node.busy_s += result.duration_s
        self.news.cache(node, result.events, result.duration_s)
        self.clock.at(node.step_ends_s, self._end_step, node, result.outputs, result.prefill_tokens)

    def _end_step(self, node: Node, outputs: list[Output], computed: int) -> None:
        node.busy = False
        self.stepped(node, outputs, computed)
        self.stir(node)
