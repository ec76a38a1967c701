"""One token at a time goes the short way; it comes out as by the long one, whatever state its run is in."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.codec import decode
from headrace.broker.messages.frames import Frame, JobFault, Row
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable
from headrace.broker.settings import SessionSettings
from headrace.broker.worker.outbox import TokenOutbox
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.protocol.test_protocol_runs import make

SUBJECTS = Subjects("hr")


class World:
    """The connection, the lease and the engine of a worker with one run."""

    def __init__(self, *, held: bool = True, most_bytes: int = 10_000) -> None:
        self.held = held
        self.sent: list[tuple[str, list[Row]]] = []
        self.parked: list[Run] = []
        self.table = RunTable()
        settings = SessionSettings(parked_tokens=3, max_frame_bytes=most_bytes)
        played: Any = self
        deps = WorkerDeps(messaging=played, subjects=SUBJECTS, settings=settings)
        self.outbox = TokenOutbox(deps, played, self.table, played, worker="w")

    def send(self, subject: str, data: bytes) -> None:
        self.sent.append((subject, decode(Frame, data).rows))

    def park(self, run: Run) -> None:
        self.parked.append(run)

    def started(self, state: RunState) -> Run:
        run = make(choices=2)
        run.begin([], [])
        run.state = state
        self.table.add(run)
        return run


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.LAPSED, RunState.MOVING])
def test_a_token_leaves_the_same_rows_and_the_same_log_whichever_way_it_went(state: RunState) -> None:
    short, long = World(), World()
    runs = short.started(state), long.started(state)
    ways = short.outbox, long.outbox
    for token in range(4):
        ways[0].append_token(runs[0], token % 2, [token], f"t{token}")
        ways[1].append(runs[1], token % 2, [token], [f"t{token}"])
    for way in ways:
        way.flush()
    assert short.sent == long.sent
    assert bool(short.sent) is (state is RunState.RUNNING)
    assert short.parked == [runs[0]] * len(long.parked)
    for mine, other in zip(runs[0].choices, runs[1].choices, strict=True):
        assert (mine.ids, mine.texts, mine.sent) == (other.ids, other.texts, other.sent)


def test_a_lapsed_run_is_parked_when_it_has_said_enough_that_nobody_hears() -> None:
    world = World()
    out, run = world.outbox, world.started(RunState.LAPSED)
    for token in range(3):
        assert not world.parked
        out.append_token(run, 0, [token], "x")
    assert world.parked == [run]


def test_without_the_lease_tokens_are_kept_instead_of_sent() -> None:
    world = World(held=False)
    out, run = world.outbox, world.started(RunState.RUNNING)
    out.append_token(run, 0, [7], "x")
    out.flush()
    assert (world.sent, run.state, run.choices[0].ids, run.choices[0].sent) == ([], RunState.LAPSED, [7], 0)


@pytest.mark.parametrize("end", ["move", "forget"])
def test_a_run_that_was_stopped_with_tokens_pending_stays_stopped_when_the_lease_lapses(end: str) -> None:
    world = World(held=False)
    out, run = world.outbox, world.started(RunState.RUNNING)
    out.append_token(run, 0, [7], "x")
    getattr(run, end)()
    stopped = run.state
    out.flush()
    assert (world.sent, run.state) == ([], stopped)


async def test_a_claimed_run_that_fails_ends_without_having_run() -> None:
    world = World()
    out, run = world.outbox, world.started(RunState.CLAIMING)
    out.fail(run, JobFault("engine_error", "its payload is gone"))
    ((subject, (row,)),) = world.sent
    assert (subject, row.choice, row.ids, row.fin and row.fin.reason) == (SUBJECTS.out("i"), 0, [], "error")
    assert run.state is RunState.ENDED
    assert run.resent_s > 0


async def test_a_claimed_run_that_fails_without_the_lease_says_so_once_it_is_current() -> None:
    world = World(held=False)
    out, run = world.outbox, world.started(RunState.CLAIMING)
    out.fail(run, JobFault("engine_error", "its payload is gone"))
    assert (world.sent, run.state) == ([], RunState.LAPSED)
    world.held = True
    out.continue_run(run)
    assert [row.fin is not None for _, rows in world.sent for row in rows] == [True]
    assert run.state is RunState.ENDED


def test_a_step_too_large_for_a_frame_leaves_in_several() -> None:
    world = World(most_bytes=200)
    out, run = world.outbox, world.started(RunState.RUNNING)
    for choice in (0, 1):
        out.append(run, choice, list(range(20)), ["a longer text"] * 20)
    out.flush()
    assert {subject for subject, _ in world.sent} == {SUBJECTS.out("i")}
    rows = [row for _, rows in world.sent for row in rows]
    assert len(rows) == len(world.sent) > 2
    for choice in (0, 1):
        mine = [row for row in rows if row.choice == choice]
        assert [n for row in mine for n in row.ids] == list(range(20))
        assert [row.offset for row in mine] == [row.ids[0] for row in mine]
