"""The decision loop of a router session: it asks the scheduler, and has placements and refusals carried out."""

from __future__ import annotations

import asyncio
import time

from headrace.router.placement.types import Shed, Waiting
from headrace.router.session import metrics
from headrace.router.session.held_request import HeldRequest, RequestState
from headrace.router.session.placer import Placer
from headrace.router.session.refusals import Refuser, fault_of
from headrace.router.session.release import RequestRelease
from headrace.router.session.state import RouterState
from headrace.router.session.suspect_waits import SuspectWaits
from headrace.router.settings import SessionOptions

LEAST_NAP_S = 0.001


class Dispatcher:
    """Hands each decision of the scheduler to the placer or to the refuser."""

    def __init__(
        self,
        options: SessionOptions,
        state: RouterState,
        placer: Placer,
        refuser: Refuser,
        release: RequestRelease,
        suspect_waits: SuspectWaits,
    ) -> None:
        self._options = options
        self._window = state.window
        self._scheduler = state.scheduler
        self._permission = state.permission
        self._changed = state.changed
        self._placer = placer
        self._refuser = refuser
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._decided_s = 0.0
        self._suspect_waits = suspect_waits

    async def run(self) -> None:
        """Decide after every change, when the scheduler wants to be asked, and every `look_s`, until cancelled."""
        while True:
            self._changed.clear()
            self.dispatch()
            now = self._loop.time()
            nap_s = self._options.look_s
            if self._scheduler.waiting and (wake_s := self._scheduler.next_wake_s(now)) is not None:
                nap_s = min(nap_s, max(LEAST_NAP_S, wake_s - now))
            try:
                async with asyncio.timeout(nap_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    @property
    def busy(self) -> bool:
        """Placements or refusals are on their way."""
        return bool(self._placer.in_flight or self._refuser.in_flight)

    def abandon(self) -> None:
        """Stop waiting for placements and refusals on their way."""
        self._placer.abandon()
        self._refuser.abandon()

    def place_now(self, held: HeldRequest, request: Waiting) -> bool:
        """Place a request that has just come, if nothing waits, without the next round. Return whether that was done."""
        if self._placer.in_flight >= self._options.max_placing or not self._window.claims_valid:
            return False
        began = time.perf_counter()
        placement = self._scheduler.place_now(request, self._loop.time())
        if placement is None:
            return False
        metrics.DECISION_S.observe(time.perf_counter() - began)
        self._placer.place(held, placement)
        return True

    def dispatch(self) -> None:
        """Carry out what the scheduler decides now.

        Nothing is decided without permission, nor in a process that was frozen: the server has given its requests to others.
        """
        if not self._permission.granted:
            return
        if not self._window.claims_valid:
            self._release.give_back_waiting()
            return
        if self._placer.in_flight >= self._options.max_placing:
            return
        now = self._loop.time()
        if not self._scheduler.waiting and now < self._decided_s + self._options.look_s:
            return  # the scheduler would only forget what is old
        self._decided_s = now
        began = time.perf_counter()
        decisions = self._scheduler.decide(now)
        metrics.DECISION_S.observe(time.perf_counter() - began)
        self._suspect_waits.note(self._scheduler.suspects_awaiting_lost, now)
        for decision in decisions:
            held = decision.request.key
            if not isinstance(held, HeldRequest) or held.state is not RequestState.WAITING:
                continue
            if isinstance(decision, Shed):
                self._refuser.refuse(held, fault_of(decision))
            else:
                self._placer.place(held, decision)
