"""What becomes of each request in the window: placed, refused, dropped, or given back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.broker.membership.members import Members
from headrace.broker.messages import JobFault
from headrace.broker.protocol.runs import Tombstones
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.placement.types import Placement, Shed
from headrace.router.session import metrics
from headrace.router.session.placement_events import Announcer
from headrace.router.session.placer import Placer
from headrace.router.session.ports import Scheduling
from headrace.router.session.prediction_accuracy import PredictionAccuracy
from headrace.router.session.refusals import Refuser, fault_of
from headrace.router.session.window import HeldRequest, RequestWindow
from headrace.router.settings import SessionOptions


class Dispatcher:
    """Asks the scheduler and carries out what it says. `balance` must be set before the first request comes."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        members: Members,
        window: RequestWindow,
        scheduler: Scheduling,
        tombstones: Tombstones,
        hindsight: PredictionAccuracy,
        *,
        pool: str,
        router: str,
        options: SessionOptions,
        may_take: Callable[[], bool],
        changed: Callable[[], None],
        record: Callable[[HeldRequest, Placement], None] | None,
        wall: Callable[[], float],
    ) -> None:
        """`may_take`: this router may decide. `changed`: have a look soon."""
        self._window = window
        self._scheduler = scheduler
        self._tombstones = tombstones
        self._hindsight = hindsight
        self._options = options
        self._may_take = may_take
        self._changed = changed
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._looked_s = 0.0
        self.balance: Callable[[], None] = lambda: None
        self._placer = Placer(
            messaging,
            subjects,
            Announcer(messaging, subjects, pool=pool, router=router),
            pool=pool,
            timing=options.timing,
            on_placed=self._on_placed,
            on_full=self._on_full,
            on_impossible=self.refuse,
            wall=wall,
        )
        self._refuser = Refuser(
            messaging,
            subjects,
            members,
            timing=options.timing,
            limit=options.max_refusing,
            lease_held=may_take,
            on_settled=lambda held: self.settle(held, "refused"),
            on_let_go=self.give_back,
        )

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """From here on placements and refusals run in this group."""
        self._placer.tasks = self._refuser.tasks = tasks

    def close(self) -> None:
        """Wait for nothing any more."""
        self._placer.abandon()
        self._refuser.abandon()

    @property
    def busy(self) -> bool:
        """Something is on its way."""
        return bool(self._placer.in_flight or self._refuser.in_flight)

    def look(self) -> None:
        """One look at the window. Never by a process that was frozen: others have its requests by now."""
        if not self._may_take():
            return
        if not self._window.ours:
            self.let_go()
            return
        if self._placer.in_flight >= self._options.max_placing:
            return
        now = self._loop.time()
        if not self._scheduler.waiting and now < self._looked_s + self._options.look_s:
            return  # the scheduler would only forget what is old
        self._looked_s = now
        began = time.perf_counter()
        decisions = self._scheduler.decide(now)
        metrics.DECISION_S.observe(time.perf_counter() - began)
        for decision in decisions:
            held = decision.request.key
            if not isinstance(held, HeldRequest) or held.state != "waiting":
                continue
            if isinstance(decision, Shed):
                self.refuse(held, fault_of(decision))
            else:
                self._placer.place(held, decision)

    def refuse(self, held: HeldRequest, fault: JobFault) -> None:
        self._refuser.refuse(held, fault)

    def _on_placed(self, held: HeldRequest, placement: Placement) -> None:
        metrics.PLACED.labels(placement.reason).inc()
        metrics.WAITED_S.observe(placement.waited_s)
        metrics.count_prefill(placement)
        self._hindsight.placed(placement)
        if self._record is not None:
            self._record(held, placement)
        self.settle(held, "")
        self._changed()

    def _on_full(self, held: HeldRequest, placement: Placement) -> None:
        self._scheduler.unplace(placement, self._loop.time())
        held.state = "waiting"
        if held.id in self._tombstones:
            self.drop(held, "cancelled")
        elif not self._may_take():
            self._scheduler.cancel([held.id])
            self.give_back(held)
        self._changed()

    def settle(self, held: HeldRequest, how: str) -> None:
        """It is somebody else's now, or has ended: the stored request may go."""
        if self._window.remove(held):
            if how:
                metrics.DROPPED.labels(how).inc()
            held.delivery.ack()
            self.balance()

    def drop(self, held: HeldRequest, how: str) -> None:
        """Nobody wants it any more."""
        self._scheduler.cancel([held.id])
        self.settle(held, how)

    def give_back(self, held: HeldRequest) -> None:
        """Somebody else may have it: at once if the claim on it is ours to give up, else when the server says so."""
        ours = self._window.ours
        if self._window.remove(held):
            metrics.DROPPED.labels("given_back" if ours else "let_go").inc()
            if ours:
                held.delivery.nak()
            self.balance()

    def let_go(self) -> None:
        """Of all that waits. What is on its way to a worker goes on: its outcome is to be known."""
        waiting = [held for held in self._window if held.state == "waiting"]
        self._scheduler.cancel([held.id for held in waiting])
        for held in waiting:
            self.give_back(held)
        self._window.anew()
