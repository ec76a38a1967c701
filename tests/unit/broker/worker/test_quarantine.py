"""A suspect that has gone on is cleared by its judge, and others leave its worker where there is room for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker.codec import encode
from headrace.broker.messages.control import HistoryEntry, Suspicion
from headrace.broker.messages.events import LoadReport
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable
from headrace.broker.settings import Timing
from headrace.broker.worker.quarantine import ISOLATION_REASON, Quarantine, co_runners
from headrace.jetstream.errors import JetStreamError, NotConnected
from headrace.jetstream.ports import Message
from tests.unit.broker.protocol.test_protocol_runs import make
from tests.unit.broker.worker.bench import Bench


class Judges:
    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.asked: list[Run] = []

    async def suspicion(self, run: Run) -> Suspicion | None:
        self.asked.append(run)
        return None if self.limit is None else Suspicion(limit=self.limit)


def on_trial() -> tuple[Bench, Run]:
    run = make(1, attempt=3, history=[HistoryEntry(1, "w8", 4), HistoryEntry(2, "w9", 4)])
    run.begin([[7, 7]], [])
    run.state = RunState.RUNNING
    run.clear_s = 1.0
    return Bench(run), run


def grow(run: Run, tokens: int) -> None:
    run.append(0, [1] * tokens, ["x"] * tokens, None, None)


async def asked(bench: Bench, judges: Any, *ticks: float) -> int:
    bench.runs.judges = judges
    async with bench.tasks:
        quarantine = Quarantine(bench.deps, bench.presence, bench.runs, bench.tasks)
        for now_s in ticks:
            quarantine.tick(now_s)
    return len(judges.asked)


async def test_the_judge_is_asked_once_the_run_has_gone_on_for_long_enough_and_its_word_lifts_the_limit() -> None:
    bench, run = on_trial()
    assert await asked(bench, Judges(0), 0.0, 5.0) == 0, "no token yet"
    grow(run, 8)
    assert await asked(bench, Judges(0), 10.0, 10.9) == 0
    assert await asked(bench, Judges(0), 11.0) == 1
    assert (run.suspect, run.cleared, bench.changes) == (False, True, [3])
    assert await asked(bench, Judges(0), 12.0) == 0


async def test_without_enough_tokens_the_judge_is_not_asked() -> None:
    bench, run = on_trial()
    grow(run, 7)
    assert await asked(bench, Judges(0), 0.0, 50.0) == 0


async def test_a_judge_that_has_not_seen_as_much_or_is_gone_leaves_the_limit() -> None:
    for answer in (4, None):
        bench, run = on_trial()
        grow(run, 9)
        assert await asked(bench, Judges(answer), 0.0, 1.0) == 1
        assert run.suspect


TWO_CRASHES = [HistoryEntry(1, "w8"), HistoryEntry(2, "w9")]


def table(*states: RunState, suspect: RunState = RunState.WAITING) -> RunTable:
    """Runs in these states, and a suspect."""
    runs = RunTable()
    for seq, given in enumerate(states):
        run = make(seq, request_id=f"q{seq}")
        run.begin([], [])
        run.state = given
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
    others: tuple[str, ...] = ("w2",),
    resumable: bool = True,
    states: tuple[RunState, ...] = (RunState.RUNNING, RunState.RUNNING),
) -> list[int]:
    bench = Bench(*table(*states), timing=Timing(trial_patience_s=0.0))
    bench.world.subscribe = reports.subscribe
    bench.world.others = others
    bench.world.fixed = set() if resumable else set(bench.runs.table)
    async with bench.tasks:
        Quarantine(bench.deps, bench.presence, bench.runs, bench.tasks).tick(0.0)
    assert {reason for _, _, reason, _ in bench.world.moved} <= {ISOLATION_REASON}
    return [seq for seq, *_ in bench.world.moved]


@pytest.mark.parametrize(
    ("reports", "moved"),
    [
        ((report("w2", 8, 6),), [0, 1]),
        ((report("w2", 8, 7),), []),
        ((report("w", 8, 0),), []),  # its own room is no room
        ((report("w3", 8, 0),), []),  # it takes no requests
        ((report("w2", 0, 0),), []),  # it is on trial itself
        ((b"\xc1", report("w2", 8, 0)), [0, 1]),  # a report that nobody can read
        ((), []),
    ],
)
async def test_they_go_where_the_reports_of_others_show_room_for_all(reports: tuple[bytes, ...], moved: list[int]) -> None:
    heard = Reports(*reports)
    assert await cleared(heard) == moved
    assert heard.left == 1, "it does not listen any more"


async def test_what_cannot_be_continued_stays() -> None:
    assert await cleared(Reports(report("w2", 8, 0)), resumable=False) == []


async def test_where_there_is_no_other_worker_they_stay() -> None:
    assert await cleared(Reports(report("w2", 8, 0)), others=()) == []


async def test_without_the_broker_they_stay() -> None:
    assert await cleared(Reports(error=NotConnected("gone"))) == []


async def test_what_only_waits_can_always_go_elsewhere_and_what_is_being_claimed_not_yet() -> None:
    waits = (RunState.WAITING, RunState.WAITING)
    assert await cleared(Reports(report("w2", 8, 0)), resumable=False, states=waits) == [0, 1]
    claimed = (RunState.RUNNING, RunState.CLAIMING)
    assert await cleared(Reports(report("w2", 8, 0)), states=claimed) == []
