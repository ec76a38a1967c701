"""Preempts batch runs of one worker: hands them back with their tokens when interactive work needs their slots or blocks.

The message of a preempted run is moved, as in a drain, to class `rb`: the next attempt resumes from the run's tokens.
"""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker import metrics
from headrace.broker.log_ids import log_ids
from headrace.broker.messages import LoadReport
from headrace.broker.protocol.preemption import Yielding, blocks_of, choose, lost_tokens, may_yield
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.ports import Executor
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps

log = structlog.get_logger()

REASON = "preempted"
LOOK_S = 0.1
SPARE_PART = 64  # of the KV blocks, one in so many stays free for answers of interactive runs that grow


class Preemption:
    """Decides when batch runs of one worker make way, and hands them back."""

    def __init__(self, deps: WorkerDeps, state: WorkerState, executor: Executor, runs: RunLifecycle) -> None:
        self._most_moves = deps.settings.max_preemptions
        self._state = state
        self._executor = executor
        self._runs = runs

    @property
    def slots(self) -> int:
        """Slots that interactive work can have although batch runs hold them."""
        if not self._state.runs.batch:
            return 0
        return sum(run.envelope.choices for run in self._candidates())

    def yielding(self) -> Yielding:
        """Describe the runs that would make way, for the load report."""
        found = [run for run in self._candidates() if self._executor.resumable(run)]
        size = self._state.member.block_size
        slots, blocks = sum(run.envelope.choices for run in found), sum(blocks_of(run, size) for run in found)
        return Yielding(len(found), slots, blocks, found)

    def make_room(self, arrived: Run) -> None:
        """Preempt what this new run needs. To be called before it is admitted; a batch run may have to leave itself."""
        if not self._state.runs.batch:
            return
        over = self._state.runs.sequences - self._state.slots
        if over > 0:
            over -= sum(run.envelope.choices for run in self._state.runs if run.stopping or run.state is RunState.ENDED)
        self._preempt(slots=over, blocks=0 if arrived.yields_place else self._missing_blocks(arrived))

    async def run(self) -> None:
        """Keep some KV blocks free beside interactive runs, until cancelled: one batch run at a time makes way for them."""
        while True:
            await asyncio.sleep(LOOK_S)
            runs = self._state.runs
            if runs.batch and len(runs) > len(runs.batch):
                load = self._load()
                if load.blocks_total and load.blocks_total - load.blocks_used < load.blocks_total // SPARE_PART:
                    self._preempt(slots=0, blocks=1)

    def _candidates(self) -> list[Run]:
        state = self._state
        if not state.runs.batch or not state.taking or state.runs.on_trial:
            return []
        return [run for run in state.runs.batch if may_yield(run, self._most_moves)]

    def _missing_blocks(self, run: Run) -> int:
        load, size = self._load(), self._state.member.block_size
        if not load.blocks_total or not size:
            return 0
        return blocks_of(run, size) + 1 - (load.blocks_total - load.blocks_used)

    def _load(self) -> LoadReport:
        state = self._state
        return self._executor.load(
            LoadReport(worker=state.worker, epoch=state.member.epoch, n=0, at=0.0, slots=0, running=0, waiting=0)
        )

    def _preempt(self, *, slots: int, blocks: int) -> None:
        if slots <= 0 and blocks <= 0:
            return
        size = self._state.member.block_size
        for run in choose(self._candidates(), slots=slots, blocks=blocks, block_size=size, resumable=self._executor.resumable):
            lost = lost_tokens(run)
            log.info("run.preempted", **log_ids(run.envelope), attempt=run.attempt, tokens=run.made, lost=lost)
            metrics.PREEMPTED.inc()
            metrics.PREEMPTED_TOKENS.inc(lost)
            self._runs.move_soon(run, reason=REASON)
