"""What is in the way of suspects, and when it is moved elsewhere."""

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


def table(*states: RunState, suspect: RunState = RunState.WAITING) -> RunTable:
    """Runs in these states, and a suspect."""
    runs = RunTable()
    for seq, state in enumerate(states):
        run = make(seq, request_id=f"q{seq}")
        run.begin([], [])
        run.state = state
        runs.add(run)
    last = make(99, request_id="last", attempt=3, history=TWO_CRASHES)
    last.begin([], [])
    last.state = suspect
    runs.add(last)
    return runs


@pytest.mark.parametrize("suspect", [RunState.WAITING, RunState.CLAIMING, RunState.RUNNING])
def test_what_runs_or_waits_beside_a_suspect_is_in_its_way(suspect: RunState) -> None:
    states = (RunState.RUNNING, RunState.CLAIMING, RunState.WAITING, RunState.MOVING, RunState.ENDED)
    assert [run.id for run in co_runners(table(*states, suspect=suspect))] == ["q0", "q1", "q2"]


def test_suspects_are_not_in_each_others_way() -> None:
    runs = table(RunState.RUNNING)
    runs.add(make(98, request_id="another", attempt=3, history=TWO_CRASHES))
    assert [run.id for run in co_runners(runs)] == ["q0"]


def test_where_no_suspect_is_nothing_is_in_the_way() -> None:
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


async def cleared(
    reports: Reports,
    *,
    serving: tuple[str, ...] = ("w1", "w2"),
    resumable: bool = True,
    states: tuple[RunState, ...] = (RunState.RUNNING, RunState.RUNNING),
) -> list[str]:
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

    settings = SessionSettings(timing=Timing(trial_patience_s=0.0))
    deps = WorkerDeps(messaging=reports, subjects=Subjects(), settings=settings)  # type: ignore[arg-type]
    state = WorkerState(WorkerMember(worker="w1", pool="p", model="m", slots=8), slots=8, tombstone_s=1.0)
    state.runs = table(*states)
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
        ((report("w2", 0, 0),), []),  # it is on trial itself
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


async def test_what_only_waits_can_always_go_elsewhere_and_what_is_being_claimed_not_yet() -> None:
    waits = (RunState.WAITING, RunState.WAITING)
    assert await cleared(Reports(report("w2", 8, 0)), resumable=False, states=waits) == ["q0", "q1"]
    claimed = (RunState.RUNNING, RunState.CLAIMING)
    assert await cleared(Reports(report("w2", 8, 0)), states=claimed) == []
