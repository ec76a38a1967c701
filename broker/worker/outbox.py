"""The send path of one worker: rows of its runs, one frame per ingress and engine step, sent only under the lease."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import lru_cache

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.messages.frames import Finish, Frame, JobFault, Row, Text, TokenLogprob
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable
from headrace.broker.worker.ports import Executor
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper

_RUNNING = RunState.RUNNING  # an enum's member costs a look-up of its own, here for every token


class TokenOutbox:
    """Holds the rows of an engine step until `flush`. The lease is checked against monotonic time at every send."""

    def __init__(self, deps: WorkerDeps, lease: LeaseKeeper, table: RunTable, executor: Executor, *, worker: str) -> None:
        self._messaging = deps.frames or deps.messaging
        self._subject_of = lru_cache(maxsize=1024)(deps.subjects.out)
        self._parked_tokens = deps.settings.parked_tokens
        self.max_frame_bytes = deps.settings.max_frame_bytes
        self._lease = lease
        self._table = table
        self._executor = executor
        self._worker = worker
        self._pending: defaultdict[str, list[Row]] = defaultdict(list)  # by judge
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
            self._pending[run.judge].append(run.append(choice, ids, texts, logprobs, fin))
            if fin is not None:
                self._ending.append(run)
        elif run.state is RunState.LAPSED:
            run.append(choice, ids, texts, logprobs, fin)
            log = run.choices[choice]
            if len(log.ids) - log.sent >= self._parked_tokens:
                self._executor.park(run)

    def append_token(self, run: Run, choice: int, ids: list[int], text: Text) -> None:
        """Take one token in `ids` with its text and nothing else, as nearly every output is: the short way of `append`."""
        texts = [text]
        if run.state is not _RUNNING:
            self.append(run, choice, ids, texts)
            return
        log = run.choices[choice]
        logged, said = log.ids, log.texts
        self._pending[run.judge].append(Row(run.id, run.attempt, run.run, choice, len(logged), ids, texts))
        logged += ids
        said += texts

    def flush(self) -> None:
        """Send one frame per ingress for everything appended since the last flush."""
        if not self._pending:
            return
        if not self._lease.held:
            self.lapsed()
            return
        pending, self._pending = self._pending, defaultdict(list)
        for judge, rows in pending.items():
            self._send(judge, rows)
        if self._ending:
            for run in self._ending:
                if run.state is _RUNNING and run.complete:
                    run.end(asyncio.get_running_loop().time())
            self._ending.clear()

    def lapsed(self) -> None:
        """Drop what is pending, because the lease is lost. It is in the logs, and is sent from there if its run is current."""
        for rows in self._pending.values():
            for row in rows:
                run = self._table.find(row)
                if run is None or run.stopping:
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
            self._send(run.judge, [row])
            run.end(asyncio.get_running_loop().time())
        else:
            run.lapse()  # the row is sent once the judge has called this run current

    def resend(self, run: Run, offsets: list[int]) -> None:
        if run.state in (RunState.RUNNING, RunState.ENDED) and self._lease.held:
            self.flush()  # what is pending has been logged too and would arrive twice
            rows = run.rows_since(offsets)
            if rows:
                self._send(run.judge, rows)

    def repeat_end(self, run: Run, now_s: float, *, every_s: float) -> None:
        if now_s - run.resent_s >= every_s and self._lease.held:
            run.resent_s = now_s
            self._send(run.judge, run.rows_since([len(log.ids) for log in run.choices]))

    def continue_run(self, run: Run) -> None:
        run.confirm()
        self.resend(run, [log.sent for log in run.choices])
        if run.complete:
            run.end(asyncio.get_running_loop().time())
        else:
            self._executor.unpark(run)

    def _send(self, judge: str, rows: list[Row]) -> None:
        """Send rows, in several frames if they are too large for one. The caller has checked that they may be sent."""
        data = encode(Frame(worker=self._worker, rows=rows))
        if len(data) <= self.max_frame_bytes or (len(rows) == 1 and len(rows[0].ids) < 2):
            # One token cannot be made smaller: the server's own limit decides.
            metrics.FRAMES.inc()
            metrics.ROWS.inc(len(rows))
            self._messaging.send(self._subject_of(judge), data)
            return
        middle = len(rows) // 2
        for part in (rows[:middle], rows[middle:]) if middle else ([row] for row in _split(rows[0])):
            self._send(judge, part)


def _split(row: Row) -> tuple[Row, Row]:
    """Split the tokens of a row in two. The end goes with the second."""
    middle = len(row.ids) // 2
    logprobs = row.logprobs
    return (
        Row(
            row.id,
            row.attempt,
            row.run,
            row.choice,
            row.offset,
            row.ids[:middle],
            row.texts[:middle],
            logprobs[:middle] if logprobs is not None else None,
        ),
        Row(
            row.id,
            row.attempt,
            row.run,
            row.choice,
            row.offset + middle,
            row.ids[middle:],
            row.texts[middle:],
            logprobs[middle:] if logprobs is not None else None,
            row.fin,
        ),
    )
