"""Sends the reports of a worker to routers and judges: job events as they happen, and its load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.broker.codec import encode
from headrace.broker.messages import EventKind, JobEvent, JobEvents, LoadReport
from headrace.broker.protocol.preemption import Yielding
from headrace.broker.worker.ports import Executor
from headrace.broker.worker.ranks import loads_by_rank
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps

EVENTS_GATHER_S = 0.005


class EventSender:
    """Sends job events, gathered for a few milliseconds into one message: readers build load views from them, not answers.

    `started` is different: by it a judge knows that a worker really had a first attempt, and counts its crash.  It goes out
    before the engine's next step.
    """

    def __init__(self, deps: WorkerDeps, state: WorkerState) -> None:
        self._messaging = deps.messaging
        self._subject = deps.subjects.events(state.pool)
        self._worker = state.worker
        self._events: list[JobEvent] = []
        self._urgent = False

    def add(
        self,
        kind: EventKind,
        request_id: str,
        attempt: int,
        tokens: int,
        *,
        uncached: int = 0,
        rank: int | None = None,
        fetch_ms: int = 0,
    ) -> None:
        """Send an event of this worker within `EVENTS_GATHER_S`, and `started` in this turn of the event loop."""
        if not self._events:
            asyncio.get_running_loop().call_later(EVENTS_GATHER_S, self._send)
        self._events.append(JobEvent(kind, request_id, attempt, self._worker, tokens, uncached, rank=rank, fetch_ms=fetch_ms))
        if kind == "started" and not self._urgent:
            self._urgent = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._urgent = False
        if not self._events:
            return
        events, self._events = self._events, []
        self._messaging.send(self._subject, encode(JobEvents(events=events)))


class LoadReporter:
    """Sends load reports: every period, and at once after a change, though never closer together than the gap."""

    def __init__(
        self, deps: WorkerDeps, state: WorkerState, executor: Executor, yielding: Callable[[], Yielding] = Yielding
    ) -> None:
        """`executor` fills in the engine's part of a report; `yielding` describes the runs that would make way for others."""
        self._messaging = deps.messaging
        self._subject = deps.subjects.load(state.pool, state.worker)
        self._period_s = deps.timing.load_period_s
        self._gap_s = deps.timing.load_gap_s
        self._wall = deps.wall
        self._state = state
        self._executor = executor
        self._yielding = yielding
        self._change = asyncio.Event()

    def changed(self) -> None:
        """Report soon, because the next report will differ. Cheap: called for every run that comes or goes."""
        self._change.set()

    async def run(self) -> None:
        """Report until cancelled."""
        n = 0
        while True:
            n += 1
            self._change.clear()
            self._messaging.send(self._subject, encode(self._report(n)))
            await asyncio.sleep(self._gap_s)
            try:
                async with asyncio.timeout(self._period_s - self._gap_s):
                    await self._change.wait()
            except TimeoutError:
                pass

    def _report(self, n: int) -> LoadReport:
        state = self._state
        yielding = self._yielding()
        return self._executor.load(
            LoadReport(
                worker=state.worker,
                epoch=state.member.epoch,
                n=n,
                at=self._wall(),
                slots=state.open_slots,
                running=len(state.runs),
                waiting=0,
                suspects=len(state.runs.suspects),
                limit=state.runs.group_limit,
                batch=len(state.runs.batch),
                yielding=yielding.runs,
                yielding_blocks=yielding.blocks,
                ranks=loads_by_rank(state.runs, yielding.found, ranks=state.member.ranks, block_size=state.member.block_size),
            )
        )
