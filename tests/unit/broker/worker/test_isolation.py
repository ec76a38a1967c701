"""Whom a job in its last life waits for, and when they are asked to go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker.codec import encode
from headrace.broker.messages import HistoryEntry, LoadReport, WorkerMember
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable
from headrace.broker.settings import SessionSettings, Timing
from headrace.broker.worker.isolation import REASON, IsolationMover, co_runners
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError, NotConnected
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.unit.broker.protocol.test_runs import make

TWO_CRASHES = [HistoryEntry(1, "w8"), HistoryEntry(2, "w9")]


def table(*states: RunState, alone: RunState = RunState.WAITING) -> RunTable:
    """Runs in these states, and one in its last life."""
    runs = RunTable()
    for seq, state in enumerate(states):
        run = make(seq, request_id=f"q{seq}")
        run.begin([], [])
        run.state = state
        runs.add(run)
    last = make(99, request_id="last", attempt=3, history=TWO_CRASHES)
    last.begin([], [])
    last.state = alone
    runs.add(last)
    return runs


def test_it_waits_for_what_has_started() -> None:
    runs = table(RunState.RUNNING, RunState.CLAIMING, RunState.WAITING, RunState.MOVING, RunState.ENDED)
    assert [run.id for run in co_runners(runs)] == ["q0", "q1"]


@pytest.mark.parametrize("alone", [RunState.CLAIMING, RunState.RUNNING])
def test_one_in_its_last_life_that_runs_may_end_and_nobody_is_moved_for_it(alone: RunState) -> None:
    runs = table(RunState.RUNNING, alone=alone)
    waiting = make(98, request_id="another", attempt=3, history=TWO_CRASHES)
    runs.add(waiting)
    assert co_runners(runs) == []


def test_where_nobody_is_in_a_last_life_nobody_is_in_the_way() -> None:
    runs = RunTable()
    runs.add(make())
    assert co_runners(runs) == []


class Reports:
    """A connection over which others report, or which is gone."""

    def __init__(self, *reports: bytes, error: JetStreamError | None = None) -> None:
        self._reports = reports
        self._error = error
        self.left = 0

    async def subscribe(self, subject: str, on_message: Callable[[Message], None]) -> Reports:
        if self._error is not None:
            raise self._error
        for data in self._reports:
            on_message(Message(subject, data))
        return self

    async def unsubscribe(self) -> None:
        self.left += 1


def report(worker: str, slots: int, running: int) -> bytes:
    return encode(LoadReport(worker=worker, epoch=1, n=1, at=0.0, slots=slots, running=running, waiting=0))


async def cleared(reports: Reports, *, serving: tuple[str, ...] = ("w1", "w2"), resumable: bool = True) -> list[str]:
    moved = []

    class Others:
        """The leases, the engine, and what moves runs."""

        def serving_workers(self, pool: str) -> list[WorkerMember]:
            return [WorkerMember(worker=name, pool=pool, model="m", slots=8) for name in serving]

        def having(self, pool: str, adapter: str | None) -> list[WorkerMember]:
            return self.serving_workers(pool)

        def resumable(self, run: Run) -> bool:
            return resumable

        async def move(self, run: Run, *, suspect: str | None, reason: str) -> None:
            assert (suspect, reason) == (None, REASON)
            moved.append(run.id)

    settings = SessionSettings(timing=Timing(alone_patience_s=0.0))
    deps = WorkerDeps(messaging=reports, subjects=Subjects(), settings=settings)  # type: ignore[arg-type]
    state = WorkerState(WorkerMember(worker="w1", pool="p", model="m", slots=8), slots=8, tombstone_s=1.0)
    state.runs = table(RunState.RUNNING, RunState.RUNNING)
    others: Any = Others()
    async with TaskScope() as tasks:
        IsolationMover(deps, state, others, others, others, tasks).tick()
    return moved


@pytest.mark.parametrize(
    ("reports", "moved"),
    [
        ((report("w2", 8, 6),), ["q0", "q1"]),
        ((report("w2", 8, 7),), []),
        ((report("w1", 8, 0),), []),  # its own room is no room
        ((report("w3", 8, 0),), []),  # it takes no requests
        ((report("w2", 0, 0),), []),  # one in its last life is there
        ((b"\xc1", report("w2", 8, 0)), ["q0", "q1"]),  # a report that nobody can read
        ((), []),
    ],
)
async def test_they_go_where_the_reports_of_others_show_room_for_all(reports: tuple[bytes, ...], moved: list[str]) -> None:
    heard = Reports(*reports)
    assert await cleared(heard) == moved
    assert heard.left == 1, "it does not listen any more"


async def test_what_cannot_be_continued_stays() -> None:
    assert await cleared(Reports(report("w2", 8, 0)), resumable=False) == []


async def test_where_there_is_no_other_worker_they_stay() -> None:
    assert await cleared(Reports(report("w2", 8, 0)), serving=("w1",)) == []


async def test_without_the_broker_they_stay() -> None:
    assert await cleared(Reports(error=NotConnected("gone"))) == []
