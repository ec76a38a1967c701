"""A suspect that has gone on is cleared by its judge, not by its worker."""

from __future__ import annotations

from typing import Any

from headrace.broker.messages.control import HistoryEntry, Suspicion
from headrace.broker.messages.members import WorkerMember
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.session import Trial
from headrace.broker.worker.state import WorkerState
from headrace.jetstream.tasks import TaskScope
from tests.unit.broker.protocol.test_protocol_runs import make


class Judges:
    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.asked: list[Run] = []

    async def suspicion(self, run: Run) -> Suspicion | None:
        self.asked.append(run)
        return None if self.limit is None else Suspicion(limit=self.limit)


class Isolation:
    def tick(self) -> None: ...


def on_trial() -> tuple[WorkerState, Run]:
    state = WorkerState(WorkerMember(worker="w1", pool="p", model="m", slots=8), slots=8, tombstone_s=1.0)
    run = make(1, attempt=3, history=[HistoryEntry(1, "w8", 4), HistoryEntry(2, "w9", 4)])
    run.begin([[7, 7]], [])
    run.state = RunState.RUNNING
    run.clear_s = 1.0
    state.runs.add(run)
    return state, run


def grow(run: Run, tokens: int) -> None:
    run.append(0, [1] * tokens, ["x"] * tokens, None, None)


async def asked(state: WorkerState, judges: Any, *ticks: float) -> int:
    isolation: Any = Isolation()
    async with TaskScope() as tasks:
        trial = Trial(state, judges, isolation, tasks)
        for now_s in ticks:
            trial.tick(now_s)
    return len(judges.asked)


async def test_the_judge_is_asked_once_the_run_has_gone_on_for_long_enough_and_its_word_lifts_the_limit() -> None:
    state, run = on_trial()
    changes: list[bool] = []
    state.on_change(lambda: changes.append(state.runs.on_trial))
    assert await asked(state, Judges(0), 0.0, 5.0) == 0, "no token yet"
    grow(run, 8)
    assert await asked(state, Judges(0), 10.0, 10.9) == 0
    assert await asked(state, Judges(0), 11.0) == 1
    assert (run.suspect, run.cleared, changes) == (False, True, [False])
    assert await asked(state, Judges(0), 12.0) == 0


async def test_without_enough_tokens_the_judge_is_not_asked() -> None:
    state, run = on_trial()
    grow(run, 7)
    assert await asked(state, Judges(0), 0.0, 50.0) == 0


async def test_a_judge_that_has_not_seen_as_much_or_is_gone_leaves_the_limit() -> None:
    for answer in (4, None):
        state, run = on_trial()
        grow(run, 9)
        assert await asked(state, Judges(answer), 0.0, 1.0) == 1
        assert run.suspect
