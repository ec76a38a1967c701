"""Reports of one worker to routers and judges: the events of its jobs, and its load."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from headrace.broker.codec import encode
from headrace.broker.messages.events import EventKind, JobEvent, JobEvents, LoadReport, RankLoad
from headrace.broker.protocol.preemption import Yielding, blocks_of
from headrace.broker.protocol.run import Run
from headrace.broker.worker_deps import WorkerDeps

EVENTS_GATHER_S = 0.005


class Reports:
    """Job events, gathered for a few milliseconds into one message: readers build load views from them, not answers.

    `started` is different: by it a judge knows that a worker really had a first attempt, and counts its crash.  It goes out
    before the engine's next step.

    Load reports go out every period, and at once after a change, though never closer together than the gap.
    """

    def __init__(self, deps: WorkerDeps, *, pool: str, worker: str) -> None:
        self._messaging = deps.messaging
        self._timing = deps.timing
        self._events_subject = deps.subjects.events(pool)
        self._load_subject = deps.subjects.load(pool, worker)
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._events: list[JobEvent] = []
        self._urgent = False
        self._load_changed = asyncio.Event()
        self.load_changed = self._load_changed.set  # cheap: called for every run that comes or goes

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
            self._loop.call_later(EVENTS_GATHER_S, self._send)
        self._events.append(JobEvent(kind, request_id, attempt, self._worker, tokens, uncached, rank=rank, fetch_ms=fetch_ms))
        if kind == "started" and not self._urgent:
            self._urgent = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._urgent = False
        if self._events:
            events, self._events = self._events, []
            self._messaging.send(self._events_subject, encode(JobEvents(events=events)))

    async def run(self, load: Callable[[int], LoadReport]) -> None:
        """Send the reports that `load` makes, given their numbers, until cancelled."""
        changed, timing, n = self._load_changed, self._timing, 0
        while True:
            n += 1
            changed.clear()
            self._messaging.send(self._load_subject, encode(load(n)))
            await asyncio.sleep(timing.load_gap_s)
            try:
                async with asyncio.timeout(timing.load_period_s - timing.load_gap_s):
                    await changed.wait()
            except TimeoutError:
                pass


def loads_by_rank(runs: Iterable[Run], yielding: Yielding, *, ranks: int, block_size: int) -> list[RankLoad]:
    """Return the load of a worker's ranks by its runs; empty if it has only one.

    `yielding` are the batch runs that would make way for interactive work.
    """
    if ranks < 2:
        return []
    held = list(runs)
    running = Counter(run.rank for run in held)
    batch = Counter(run.rank for run in held if run.batch)
    ways: Counter[int | None] = Counter()
    blocks: Counter[int | None] = Counter()
    for run in yielding.found:
        ways[run.rank] += 1
        blocks[run.rank] += blocks_of(run, block_size)
    return [
        RankLoad(running=running[rank], batch=batch[rank], yielding=ways[rank], yielding_blocks=blocks[rank])
        for rank in range(ranks)
    ]
