"""Tokens on their way from runs to judges: logged, sent once per step, sent again when asked, never without the lease."""

from __future__ import annotations

import asyncio

from broker.executor import Executor
from broker.frames import FrameSender
from broker.messages import Finish, JobFault, Row, TokenLogprob
from broker.protocol.runs import Run, RunState
from jetstream.lease import LeaseKeeper


class Outflow:
    """The send path of one worker. The lease is checked against monotonic time at every send."""

    def __init__(self, frames: FrameSender, lease: LeaseKeeper, executor: Executor, *, parked_tokens: int) -> None:
        self._frames = frames
        self._lease = lease
        self._executor = executor
        self._parked_tokens = parked_tokens
        self._pending: dict[str, list[tuple[Run, Row]]] = {}

    def append(
        self,
        run: Run,
        choice: int,
        ids: list[int],
        texts: list[str],
        *,
        logprobs: list[TokenLogprob] | None = None,
        fin: Finish | None = None,
    ) -> None:
        """Take what an engine step gave one choice. `flush` sends it, together with the rest of the step."""
        if run.state is not RunState.RUNNING and run.state is not RunState.LAPSED:
            return
        row = run.append(choice, ids, texts, logprobs, fin)
        if run.state is RunState.RUNNING:
            pending = self._pending.get(run.judge)
            if pending is None:
                pending = self._pending[run.judge] = []
            pending.append((run, row))
        elif len(run.choices[choice].ids) - run.choices[choice].sent >= self._parked_tokens:
            self._executor.park(run)

    def flush(self) -> None:
        """Send one frame per ingress for everything appended since the last flush."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        held = self._lease.held
        for judge, rows in pending.items():
            live = []
            for run, row in rows:
                if run.state is not RunState.RUNNING and run.state is not RunState.ENDED:
                    continue
                if not held:
                    run.state = RunState.LAPSED
                    continue
                run.choices[row.choice].sent = row.offset + len(row.ids)
                live.append(row)
                if row.fin is not None and run.complete:
                    _ended(run)
            if live:
                self._frames.send(judge, live)

    def fail(self, run: Run, fault: JobFault) -> None:
        """End a run with a fault that no other worker could avoid."""
        for choice, log in enumerate(run.choices):
            if log.fin is None and not log.settled:
                self.append(run, choice, [], [], fin=Finish(reason="error", fault=fault))
                break
        self.flush()

    def resend(self, run: Run, offsets: list[int]) -> None:
        """Send everything after `offsets` again."""
        if run.state in (RunState.RUNNING, RunState.ENDED) and self._lease.held:
            self.flush()  # what is pending has been logged too and would arrive twice
            rows = run.rows_since(offsets)
            if rows:
                self._frames.send(run.judge, rows)

    def press(self, run: Run, now_s: float, *, every_s: float) -> bool:
        """Repeat the last frame of an ended run that was not answered in time. True if it was sent."""
        if now_s - run.resent_s < every_s or not self._lease.held:
            return False
        run.resent_s = now_s
        self._frames.send(run.judge, run.rows_since([len(log.ids) for log in run.choices]))
        return True

    def lapsed(self) -> None:
        """The lease is lost: what is pending is in the logs, and is sent from there if the run turns out to be current."""
        self._pending.clear()

    def go_on(self, run: Run) -> None:
        """A lapsed run is current: send what was held back and continue."""
        run.state = RunState.RUNNING
        self.resend(run, run.unsent())
        for log in run.choices:
            log.sent = len(log.ids)
        if run.complete:
            _ended(run)
        else:
            self._executor.unpark(run)


def _ended(run: Run) -> None:
    run.state = RunState.ENDED
    run.resent_s = asyncio.get_running_loop().time()
