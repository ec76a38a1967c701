"""One token at a time goes the short way; it comes out as by the long one, whatever state its run is in."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from headrace.broker.messages import JobFault, Row
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.frames import FrameSender
from headrace.broker.worker.token_outbox import TokenOutbox
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.protocol.test_runs import make


@dataclass
class World:
    """Takes frames, holds the lease, parks runs."""

    held: bool = True
    sent: list[tuple[str, list[Row]]] = field(default_factory=list)
    parked: list[Run] = field(default_factory=list)

    def send(self, judge: str, rows: list[Row]) -> None:
        self.sent.append((judge, rows))

    def park(self, run: Run) -> None:
        self.parked.append(run)


def outflow(world: World) -> TokenOutbox:
    return TokenOutbox(world, world, world, parked_tokens=3)  # type: ignore[arg-type]


def started(state: RunState) -> Run:
    run = make(choices=2)
    run.begin([], [])
    run.state = state
    return run


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.LAPSED, RunState.MOVING])
def test_a_token_leaves_the_same_rows_and_the_same_log_whichever_way_it_went(state: RunState) -> None:
    short, long = World(), World()
    runs = started(state), started(state)
    ways = outflow(short), outflow(long)
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
    out, run = outflow(world), started(RunState.LAPSED)
    for token in range(3):
        assert not world.parked
        out.append_token(run, 0, [token], "x")
    assert world.parked == [run]


def test_without_the_lease_tokens_are_kept_instead_of_sent() -> None:
    world = World(held=False)
    out, run = outflow(world), started(RunState.RUNNING)
    out.append_token(run, 0, [7], "x")
    out.flush()
    assert (world.sent, run.state, run.choices[0].ids, run.choices[0].sent) == ([], RunState.LAPSED, [7], 0)


@pytest.mark.parametrize("end", ["move", "forget"])
def test_a_run_that_was_stopped_with_tokens_pending_stays_stopped_when_the_lease_lapses(end: str) -> None:
    world = World(held=False)
    out, run = outflow(world), started(RunState.RUNNING)
    out.append_token(run, 0, [7], "x")
    getattr(run, end)()
    stopped = run.state
    out.flush()
    assert (world.sent, run.state) == ([], stopped)


async def test_a_claimed_run_that_fails_ends_without_having_run() -> None:
    world = World()
    out, run = outflow(world), started(RunState.CLAIMING)
    out.fail(run, JobFault("engine_error", "its payload is gone"))
    ((judge, (row,)),) = world.sent
    assert (judge, row.choice, row.ids, row.fin and row.fin.reason) == ("i", 0, [], "error")
    assert run.state is RunState.ENDED
    assert run.resent_s > 0


async def test_a_claimed_run_that_fails_without_the_lease_says_so_once_it_is_current() -> None:
    world = World(held=False)
    out, run = outflow(world), started(RunState.CLAIMING)
    out.fail(run, JobFault("engine_error", "its payload is gone"))
    assert (world.sent, run.state) == ([], RunState.LAPSED)
    world.held = True
    out.continue_run(run)
    assert [row.fin is not None for _, rows in world.sent for row in rows] == [True]
    assert run.state is RunState.ENDED


def test_frames_have_the_subject_of_their_ingress() -> None:
    sent: list[str] = []

    class Messaging:
        def send(self, subject: str, data: bytes) -> None:
            sent.append(subject)

    sender = FrameSender(Messaging(), Subjects("hr"), worker="w", max_bytes=1000)  # type: ignore[arg-type]
    for judge in ("i-1", "i-2", "i-1"):
        sender.send(judge, [Row("q", 1, 1, 0, 0, [1], ["x"])])
    assert sent == [Subjects("hr").out(judge) for judge in ("i-1", "i-2", "i-1")]
