"""A worker's send path: tokens, job events and load reports. Tokens are sent only under the lease."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import structlog

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.messages.events import EventKind, JobEvent, JobEvents, LoadReport, RankLoad
from headrace.broker.messages.frames import Finish, Frame, JobFault, Row, Text, TokenLogprob
from headrace.broker.messages.requests import HEADER_RANK
from headrace.broker.protocol.preemption import Yielding, blocks_of
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.state import Executor, WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


class FrameSender:
    """Encodes and sends rows. The caller has checked that they may be sent."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, worker: str, max_bytes: int) -> None:
        self._messaging = messaging
        self._worker = worker
        self._max_bytes = max_bytes
        self._subject_of = lru_cache(maxsize=1024)(subjects.out)

    def send(self, judge: str, rows: list[Row]) -> None:
        data = encode(Frame(worker=self._worker, rows=rows))
        if len(data) > self._max_bytes:
            self._send_split(judge, rows)
            return
        metrics.FRAMES.inc()
        metrics.ROWS.inc(len(rows))
        self._messaging.send(self._subject_of(judge), data)

    def _send_split(self, judge: str, rows: list[Row]) -> None:
        if len(rows) > 1:
            middle = len(rows) // 2
            self.send(judge, rows[:middle])
            self.send(judge, rows[middle:])
            return
        row = rows[0]
        if len(row.ids) < 2:  # cannot be made smaller: the server's own limit decides
            metrics.FRAMES.inc()
            metrics.ROWS.inc()
            self._messaging.send(self._subject_of(judge), encode(Frame(worker=self._worker, rows=rows)))
            return
        for part in split_row(row):
            self.send(judge, [part])


def split_row(row: Row) -> tuple[Row, Row]:
    """Split the tokens of a row in two. The end goes with the second."""
    middle = len(row.ids) // 2
    first = Row(
        row.id,
        row.attempt,
        row.run,
        row.choice,
        row.offset,
        row.ids[:middle],
        row.texts[:middle],
        row.logprobs[:middle] if row.logprobs is not None else None,
    )
    second = Row(
        row.id,
        row.attempt,
        row.run,
        row.choice,
        row.offset + middle,
        row.ids[middle:],
        row.texts[middle:],
        row.logprobs[middle:] if row.logprobs is not None else None,
        row.fin,
    )
    return first, second


_RUNNING = RunState.RUNNING  # an enum's member costs a look-up of its own, here for every token


class _Batch:
    __slots__ = ("rows", "runs")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.runs: list[Run] = []


class TokenOutbox:
    """The send path of one worker. The lease is checked against monotonic time at every send."""

    def __init__(self, frames: FrameSender, lease: LeaseKeeper, executor: Executor, *, parked_tokens: int) -> None:
        self._frames = frames
        self._lease = lease
        self._executor = executor
        self._parked_tokens = parked_tokens
        self._pending: defaultdict[str, _Batch] = defaultdict(_Batch)
        self._ending: list[Run] = []

    def append(
        self,
        run: Run,
        choice: int,
        ids: list[int],
        texts: list[Text],
        logprobs: list[TokenLogprob] | None = None,
        fin: Finish | None = None,
    ) -> None:
        """Take what an engine step gave one choice. `flush` sends it, together with the rest of the step."""
        if run.state is _RUNNING:
            batch = self._pending[run.judge]
            batch.rows.append(run.append(choice, ids, texts, logprobs, fin))
            batch.runs.append(run)
            if fin is not None:
                self._ending.append(run)
        elif run.state is RunState.LAPSED:
            run.append(choice, ids, texts, logprobs, fin)
            log = run.choices[choice]
            if len(log.ids) - log.sent >= self._parked_tokens:
                self._executor.park(run)

    def append_token(self, run: Run, choice: int, ids: list[int], text: Text) -> None:
        """Take one token in `ids` with its text and nothing else, as nearly every output is: the short way of `append`."""
        if run.state is not _RUNNING:
            self.append(run, choice, ids, [text])
            return
        batch = self._pending[run.judge]
        log = run.choices[choice]
        logged = log.ids
        batch.rows.append(Row(run.id, run.attempt, run.run, choice, len(logged), ids, [text]))
        batch.runs.append(run)
        logged.append(ids[0])
        log.texts.append(text)

    def flush(self) -> None:
        if not self._pending:
            return
        if not self._lease.held:
            self.lapsed()
            return
        pending, self._pending = self._pending, defaultdict(_Batch)
        for judge, batch in pending.items():
            self._frames.send(judge, batch.rows)
        if self._ending:
            for run in self._ending:
                if run.state is RunState.RUNNING and run.complete:
                    run.end(asyncio.get_running_loop().time())
            self._ending.clear()

    def lapsed(self) -> None:
        """Drop what is pending, because the lease is lost. It is in the logs, and is sent from there if its run is current."""
        for batch in self._pending.values():
            for run, row in zip(batch.runs, batch.rows, strict=True):
                if run.stopping:
                    continue  # it was stopped since this step, and no judge will ask for its tokens
                if run.state is not RunState.LAPSED:
                    run.lapse()
                log = run.choices[row.choice]
                log.sent = min(log.sent, row.offset)
        self._pending.clear()
        self._ending.clear()

    def fail(self, run: Run, fault: JobFault) -> None:
        """End a run with a fault that no other worker could avoid. A claimed run ends so without having been in the engine."""
        if run.state is RunState.CLAIMING:
            self._fail_unstarted(run, fault)
            return
        for choice, log in enumerate(run.choices):
            if log.fin is None and not log.settled:
                self.append(run, choice, [], [], fin=Finish(reason="error", fault=fault))
                break
        self.flush()

    def _fail_unstarted(self, run: Run, fault: JobFault) -> None:
        open_choice = next((i for i, log in enumerate(run.choices) if not log.settled), None)
        if open_choice is None:
            return
        row = run.append(open_choice, [], [], None, Finish(reason="error", fault=fault))
        if self._lease.held:
            self._frames.send(run.judge, [row])
            run.end(asyncio.get_running_loop().time())
        else:
            run.lapse()  # the row is sent once the judge has called this run current

    def resend(self, run: Run, offsets: list[int]) -> None:
        if run.state in (RunState.RUNNING, RunState.ENDED) and self._lease.held:
            self.flush()  # what is pending has been logged too and would arrive twice
            rows = run.rows_since(offsets)
            if rows:
                self._frames.send(run.judge, rows)

    def repeat_end(self, run: Run, now_s: float, *, every_s: float) -> bool:
        if now_s - run.resent_s < every_s or not self._lease.held:
            return False
        run.resent_s = now_s
        self._frames.send(run.judge, run.rows_since([len(log.ids) for log in run.choices]))
        return True

    def continue_run(self, run: Run) -> None:
        run.confirm()
        self.resend(run, [log.sent for log in run.choices])
        if run.complete:
            run.end(asyncio.get_running_loop().time())
        else:
            self._executor.unpark(run)


log = structlog.get_logger()


def choose_rank(headers: Mapping[str, str] | None, runs: Iterable[Run], *, ranks: int) -> int | None:
    """Return the rank for a new run; None if the engine has only one.

    It is the rank that a router has named. Without one, or if the engine does not have that rank (any more), it is the rank
    with the fewest runs.
    """
    if ranks < 2:
        return None
    named = headers.get(HEADER_RANK, "") if headers else ""
    if named.isdecimal() and int(named) < ranks:
        return int(named)
    if named:
        metrics.UNKNOWN_RANKS.inc()
        log.warning("work.unknown_rank", rank=named, ranks=ranks)
    counts = Counter(run.rank for run in runs)
    return min(range(ranks), key=lambda rank: counts[rank])


def loads_by_rank(runs: Iterable[Run], yielding: Iterable[Run], *, ranks: int, block_size: int) -> list[RankLoad]:
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
    for run in yielding:
        ways[run.rank] += 1
        blocks[run.rank] += blocks_of(run, block_size)
    return [
        RankLoad(running=running[rank], batch=batch[rank], yielding=ways[rank], yielding_blocks=blocks[rank])
        for rank in range(ranks)
    ]


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
