"""After a lapsed lease: nothing is sent for a run until its judge has said that it is still current."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable
from headrace.broker.worker.judge_client import JudgeClient
from headrace.broker.worker.ports import Executor
from headrace.jetstream.lease import LeaseKeeper


class Lapses:
    """Marks runs when the lease is lost, and asks about them once it is back, one question per judge."""

    def __init__(
        self,
        runs: RunTable,
        settling: JudgeClient,
        lease: LeaseKeeper,
        executor: Executor,
        *,
        drop: Callable[[Run, str], None],
        go_on: Callable[[Run], None],
    ) -> None:
        """`drop(run, why)` stops a run that is not current; `go_on(run)` sends what was held back and continues."""
        self._runs = runs
        self._settling = settling
        self._lease = lease
        self._executor = executor
        self._drop = drop
        self._go_on = go_on
        self._asking: set[Run] = set()

    def mark(self) -> None:
        """The lease is lost."""
        for run in self._runs:
            if run.state in (RunState.RUNNING, RunState.ENDED):
                run.lapse()

    def recheck(self, tasks: asyncio.TaskGroup) -> None:
        """Ask about every lapsed run that is not being asked about. Called at every tick."""
        if not self._lease.held:
            return
        by_judge: dict[str, list[Run]] = {}
        for run in self._runs:
            if run.state is RunState.LAPSED and run not in self._asking:
                by_judge.setdefault(run.judge, []).append(run)
        for runs in by_judge.values():
            self._asking.update(runs)
            tasks.create_task(self._ask(runs))

    async def _ask(self, runs: list[Run]) -> None:
        try:
            verdicts = await self._settling.check(runs)
        finally:
            self._asking.difference_update(runs)
        if not self._lease.held:
            return  # lapsed again meanwhile: the answer may be old, the next tick asks anew
        for run, verdict in verdicts.items():
            if run.state is not RunState.LAPSED:
                continue
            if verdict == "current":
                self._go_on(run)
            else:
                self._drop(run, verdict)
