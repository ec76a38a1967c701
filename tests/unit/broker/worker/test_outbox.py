"""One token at a time goes the short way; it comes out as by the long one, whatever state its run is in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest
import structlog

from headrace.broker.codec import decode
from headrace.broker.messages.events import JobEvents, LoadReport
from headrace.broker.messages.frames import JobFault, Row
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import HEADER_RANK
from headrace.broker.protocol.preemption import Yielding
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.settings import SessionSettings, Timing
from headrace.broker.worker.outbox import EventSender, FrameSender, LoadReporter, TokenOutbox, choose_rank, loads_by_rank
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.subjects import Subjects
from tests.support.virtual_time import in_virtual_time
from tests.unit.broker.protocol.test_protocol_runs import make


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


def runs(*ranks: int) -> list:  # type: ignore[type-arg]
    made = [make(n + 1, request_id=f"r{n}") for n in range(len(ranks))]
    for run, rank in zip(made, ranks, strict=True):
        run.rank = rank
    return made


def test_the_rank_that_a_router_names_is_taken() -> None:
    assert choose_rank({HEADER_RANK: "1"}, runs(1, 1, 1), ranks=2) == 1


@pytest.mark.parametrize("headers", [None, {}, {"Hr-Attempt": "2"}])
def test_without_a_router_the_rank_with_the_fewest_runs_is_taken(headers: dict[str, str] | None) -> None:
    assert choose_rank(headers, runs(0, 2, 0), ranks=3) == 1
    assert choose_rank(headers, [], ranks=3) == 0


@pytest.mark.parametrize("named", ["2", "-1", "x", "1.0", "99999999999"])
def test_a_rank_that_the_engine_does_not_have_is_reported_and_another_is_taken(named: str) -> None:
    with structlog.testing.capture_logs() as logs:
        assert choose_rank({HEADER_RANK: named}, runs(0), ranks=2) == 1
    assert [entry["event"] for entry in logs] == ["work.unknown_rank"]


def test_an_engine_with_one_rank_has_none_to_name() -> None:
    assert choose_rank({HEADER_RANK: "0"}, [], ranks=1) is None
    assert loads_by_rank(runs(0), [], ranks=1, block_size=16) == []


def test_runs_count_for_their_rank() -> None:
    held = runs(0, 1, 1)
    loads = loads_by_rank(held, held[2:], ranks=2, block_size=16)
    assert [(load.running, load.batch, load.yielding) for load in loads] == [(1, 0, 0), (2, 0, 1)]
    assert loads[1].yielding_blocks > 0


class FakeMessaging:
    def __init__(self) -> None:
        self.sent: list[tuple[float, str, bytes]] = []

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        self.sent.append((asyncio.get_running_loop().time(), subject, data))

    @property
    def times(self) -> list[float]:
        return [round(at, 4) for at, _, _ in self.sent]


class Engine:
    """Adds its part to a load report."""

    def load(self, report: LoadReport) -> LoadReport:
        return msgspec.structs.replace(report, waiting=3)


def deps(messaging: FakeMessaging, timing: Timing | None = None) -> WorkerDeps:
    settings = SessionSettings(timing=timing or Timing())
    return WorkerDeps(messaging=messaging, subjects=Subjects(), settings=settings, wall=lambda: 5.0)  # type: ignore[arg-type]


def state() -> WorkerState:
    return WorkerState(WorkerMember(worker="w", pool="p", model="m", slots=8, epoch=7), slots=8, tombstone_s=1.0)


LOADS = "hr.load.p.w"


@contextlib.asynccontextmanager
async def reporting(*, period_s: float, gap_s: float) -> AsyncIterator[tuple[LoadReporter, FakeMessaging]]:
    messaging = FakeMessaging()
    own = deps(messaging, Timing(load_period_s=period_s, load_gap_s=gap_s))
    reporter = LoadReporter(own, state(), Engine(), lambda: Yielding(runs=2, slots=3, blocks=40))  # type: ignore[arg-type]
    task = asyncio.create_task(reporter.run())
    await asyncio.sleep(0)
    try:
        yield reporter, messaging
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_a_change_is_reported_at_once_but_reports_keep_their_distance():
    async def main() -> None:
        async with reporting(period_s=0.2, gap_s=0.005) as (reporter, messaging):
            start = messaging.times[0]
            await asyncio.sleep(0.05)
            reporter.changed()
            await asyncio.sleep(0)
            for _ in range(12):
                await asyncio.sleep(0.001)
                reporter.changed()
            await asyncio.sleep(0.1)
            assert [round(at - start, 4) for at in messaging.times] == [0.0, 0.05, 0.055, 0.06, 0.065]

    in_virtual_time(main)


def test_without_a_change_a_report_comes_every_period():
    async def main() -> None:
        async with reporting(period_s=0.2, gap_s=0.005) as (_, messaging):
            await asyncio.sleep(0.85)
            start = messaging.times[0]
            assert [round(at - start, 4) for at in messaging.times] == [0.0, 0.2, 0.4, 0.6, 0.8]
            assert [decode(LoadReport, data).n for _, _, data in messaging.sent] == [1, 2, 3, 4, 5]
            assert {subject for _, subject, _ in messaging.sent} == {LOADS}
            last = decode(LoadReport, messaging.sent[-1][2])
            assert (last.worker, last.epoch, last.at, last.slots, last.running, last.waiting) == ("w", 7, 5.0, 8, 0, 3)

            assert (last.yielding, last.yielding_blocks) == (2, 40)

    in_virtual_time(main)


def test_events_of_five_milliseconds_go_out_together():
    async def main() -> None:
        messaging = FakeMessaging()
        sender = EventSender(deps(messaging), state())
        sender.add("prefilled", "a", 1, 40, uncached=8)
        await asyncio.sleep(0.004)
        sender.add("settled", "b", 2, 30)
        await asyncio.sleep(0.004)
        ((_, subject, data),) = messaging.sent
        assert subject == "hr.ev.p"
        events = decode(JobEvents, data).events
        assert [(e.kind, e.id, e.attempt, e.worker, e.tokens, e.uncached) for e in events] == [
            ("prefilled", "a", 1, "w", 40, 8),
            ("settled", "b", 2, "w", 30, 0),
        ]

    in_virtual_time(main)
