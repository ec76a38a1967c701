"""A worker's send path for tokens: log, batch per engine step, resend on request. Nothing is sent without the lease."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from headrace.broker.messages import Finish, JobFault, Row, Text, TokenLogprob
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.frames import FrameSender
from headrace.broker.worker.ports import Executor
from headrace.jetstream.lease import LeaseKeeper

_RUNNING = RunState.RUNNING  # an enum's member costs a look-up of its own, here for every token


class _Batch:
    """The rows of one step for one ingress, and the run of each."""

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
        """Send one frame per ingress for everything appended since the last flush."""
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
        """Send everything after `offsets` again."""
        if run.state in (RunState.RUNNING, RunState.ENDED) and self._lease.held:
            self.flush()  # what is pending has been logged too and would arrive twice
            rows = run.rows_since(offsets)
            if rows:
                self._frames.send(run.judge, rows)

    def repeat_end(self, run: Run, now_s: float, *, every_s: float) -> bool:
        """Repeat the last frame of an ended run that was not answered in time. True if it was sent."""
        if now_s - run.resent_s < every_s or not self._lease.held:
            return False
        run.resent_s = now_s
        self._frames.send(run.judge, run.rows_since([len(log.ids) for log in run.choices]))
        return True

    def continue_run(self, run: Run) -> None:
        """Continue a lapsed run that its judge calls current: send what was held back, then unpark it."""
        run.confirm()
        self.resend(run, [log.sent for log in run.choices])
        if run.complete:
            run.end(asyncio.get_running_loop().time())
        else:
            self._executor.unpark(run)
