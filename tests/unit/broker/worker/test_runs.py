"""A worker's questions to judges and to the object store: what no answer means, and for whom."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.broker.codec import decode_ingress_control, encode
from headrace.broker.errors import BrokerError
from headrace.broker.messages.control import Check, CheckReply, ClaimReply, HistoryEntry
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import Envelope, Spill
from headrace.broker.protocol.preemption import Yielding
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable, Turn
from headrace.broker.settings import SessionSettings, Timing
from headrace.broker.spill import fetch_payload
from headrace.broker.worker.runs import ISOLATION_REASON as REASON
from headrace.broker.worker.runs import LOOK_S, IsolationMover, JudgeClient, Preemption, RunLifecycle, co_runners
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError, NotConnected, ObjectNotFound, RequestTimeout
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World as VirtualWorld
from tests.unit.broker.protocol.test_preemption import batch_run
from tests.unit.broker.protocol.test_protocol_runs import make
from tests.unit.broker.worker.test_run_lifecycle import World
from tests.unit.broker.worker.test_state import state

SUBJECTS = Subjects("hr")
TIMING = Timing(retry_s=0.0)


class Held:
    held = True


class Living:
    async def ingress_gone(self, ingress: str) -> bool:
        return False


class SlowJudge:
    """The first question gets no answer; meanwhile one of the runs is cancelled."""

    def __init__(self, cancelled: Run) -> None:
        self.cancelled = cancelled
        self.asked = 0

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        self.asked += 1
        if self.asked == 1:
            self.cancelled.state = RunState.GONE
            raise RequestTimeout
        check = decode_ingress_control(data)
        assert isinstance(check, Check)
        return encode(CheckReply(verdicts=["current"] * len(check.runs)))


async def test_a_run_dropped_while_its_judge_is_asked_decides_nothing_about_the_others() -> None:
    runs = [make(1, request_id="a"), make(2, request_id="b")]
    judge = SlowJudge(runs[0])
    deps = WorkerDeps(messaging=judge, subjects=SUBJECTS, settings=SessionSettings(timing=TIMING))  # type: ignore[arg-type]
    judges = JudgeClient(deps, Living(), Held(), worker="w")  # type: ignore[arg-type]
    assert (await judges.check(runs))[runs[1]] == "current"


class FarJudge:
    """Its answers take `takes_s` there and back. Notes how long each was waited for."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self.waited_s: list[float] = []

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        self.waited_s.append(timeout_s)
        if timeout_s < self._takes_s:
            raise RequestTimeout
        return encode(ClaimReply(verdict="go"))


def client_of(judge: object) -> JudgeClient:
    deps = WorkerDeps(messaging=judge, subjects=SUBJECTS, settings=SessionSettings(timing=TIMING))  # type: ignore[arg-type]
    return JudgeClient(deps, Living(), Held(), worker="w")  # type: ignore[arg-type]


async def test_a_judge_whose_answers_take_longer_than_a_call_may_is_heard_in_the_end() -> None:
    judge = FarJudge(2.4)
    assert (await client_of(judge).claim(make(1), Turn(group=64))).verdict == "go"
    assert judge.waited_s == [1.0, 2.0, 4.0]


async def test_no_answer_is_waited_for_longer_than_a_lease_lives() -> None:
    run = make(1)
    judge = FarJudge(100.0)

    async def dropped() -> None:
        while len(judge.waited_s) < 6:
            await asyncio.sleep(0)
        run.state = RunState.GONE

    async with asyncio.TaskGroup() as group:
        group.create_task(dropped())
        asked = group.create_task(client_of(judge).claim(run, Turn(group=64)))
    assert asked.result().verdict == "unknown"
    assert judge.waited_s[:6] == [1.0, 2.0, 4.0, 4.0, 4.0, 4.0]


class Store:
    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)

    async def get(self, name: str) -> bytes:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Storage:
    def __init__(self, *answers: bytes | Exception) -> None:
        self.store = Store(*answers)

    def objects(self, name: str) -> Store:
        return self.store


def spilled(data: bytes) -> Envelope:
    spill = Spill(object="o", size=len(data), digest=hashlib.sha256(data).hexdigest())
    return Envelope(id="q", pool="p", model="m", judge="i", deadline=9e9, created=0.0, tokens=1, spill=spill)


async def test_a_payload_is_waited_for_as_long_as_the_broker_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.broker.spill.RETRY_S", 0.0)
    storage = Storage(*[NotConnected()] * 9, b"payload")
    assert await fetch_payload(storage, SUBJECTS, spilled(b"payload"), wanted=lambda: True) == b"payload"  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [ObjectNotFound(), b"something else"])
async def test_a_lost_or_damaged_payload_is_an_error_at_once(answer: bytes | Exception) -> None:
    with pytest.raises(BrokerError, match=r"is gone|is damaged"):
        await fetch_payload(Storage(answer), SUBJECTS, spilled(b"payload"), wanted=lambda: True)  # type: ignore[arg-type]


async def test_a_payload_that_is_no_longer_wanted_is_not_fetched() -> None:
    with pytest.raises(BrokerError, match="no longer wanted"):
        await fetch_payload(Storage(), SUBJECTS, spilled(b"payload"), wanted=lambda: False)  # type: ignore[arg-type]


SLOTS = 4


class Engine(World):
    """An engine with some KV blocks; `fixed` are the runs that no other worker could continue."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks_total = self.blocks_used = 0
        self.fixed: set[Run] = set()

    def load(self, report: LoadReport) -> LoadReport:
        return msgspec.structs.replace(report, blocks_total=self.blocks_total, blocks_used=self.blocks_used)

    def resumable(self, run: Run) -> bool:
        return run not in self.fixed


class Bench:
    """A worker with four slots and blocks of 16 tokens. `move_soon` is carried out as far as its first wait."""

    def __init__(self, *runs: Run) -> None:
        self.engine: Any = Engine()
        self.state = state(block_size=16)
        self.tasks = TaskScope()
        deps = WorkerDeps(messaging=self.engine, subjects=Subjects(), settings=SessionSettings())
        engine = self.engine
        lifecycle = RunLifecycle(deps, self.state, engine, engine, engine, engine, self.tasks)
        self.preemption = Preemption(deps, self.state, engine, lifecycle)
        for run in runs:
            self.state.runs.add(run)

    async def arrive(self, run: Run) -> list[str]:
        """Let a run come in. Returns the ids of the runs that were stopped for it at once."""
        async with self.tasks:
            self.state.runs.add(run)
            self.preemption.make_room(run)
            return [stopped.id for stopped in self.engine.stopped]


def interactive(seq: int, **values: Any) -> Run:
    return batch_run(seq, request_class="std", **values)


async def test_an_interactive_run_on_a_full_worker_gets_the_slot_of_a_batch_run() -> None:
    bench = Bench(*(batch_run(seq, made=seq) for seq in range(1, 5)))
    assert bench.preemption.slots == SLOTS
    assert await bench.arrive(interactive(9)) == ["q1"]
    assert bench.engine.moved == [(1, None, "preempted", 0)]
    assert bench.state.runs.sequences == SLOTS


async def test_a_free_slot_preempts_nothing() -> None:
    bench = Bench(*(batch_run(seq) for seq in range(1, 4)))
    assert await bench.arrive(interactive(9)) == []


async def test_a_slot_that_is_about_to_be_free_preempts_nothing() -> None:
    ended = batch_run(4, made=1)
    ended.end(0.0)
    bench = Bench(*(batch_run(seq) for seq in range(1, 4)), ended)
    assert await bench.arrive(interactive(9)) == []


async def test_interactive_runs_never_make_way() -> None:
    bench = Bench(*(interactive(seq) for seq in range(1, 5)))
    assert await bench.arrive(interactive(9)) == []
    assert bench.preemption.slots == 0


async def test_a_batch_run_that_finds_no_slot_goes_back_itself() -> None:
    bench = Bench(*(interactive(seq) for seq in range(1, 5)))
    arrived = Run(
        envelope=batch_run(9).envelope, attempt=1, history=[], run=9, delivery=batch_run(9).delivery
    )  # not started yet
    assert await bench.arrive(arrived) == []  # the engine never had it
    assert bench.engine.moved == [(9, None, "preempted", 0)]
    assert arrived.state is RunState.GONE


async def test_a_kept_batch_run_takes_its_slot_like_an_interactive_one() -> None:
    kept = batch_run(9)
    kept.kept = True
    bench = Bench(*(batch_run(seq, made=seq) for seq in range(1, 5)))
    assert await bench.arrive(kept) == ["q1"]


async def test_an_interactive_run_gets_the_blocks_that_it_needs() -> None:
    bench = Bench(batch_run(1, made=1), batch_run(2, made=2))  # 7 blocks each
    bench.engine.blocks_total, bench.engine.blocks_used = 100, 95
    assert await bench.arrive(interactive(3, tokens=64)) == []  # 4 blocks and one for the answer
    bench.engine.blocks_used = 99
    assert await bench.arrive(interactive(4, tokens=64)) == ["q1"]


async def test_a_batch_run_takes_no_blocks_from_another() -> None:
    bench = Bench(batch_run(1, made=1))
    bench.engine.blocks_total = bench.engine.blocks_used = 100
    assert await bench.arrive(batch_run(2)) == []


async def test_the_report_names_only_runs_that_can_really_leave() -> None:
    one, other = batch_run(1, made=5), batch_run(2, choices=2)
    bench = Bench(one, other, interactive(3))
    assert bench.preemption.yielding() == Yielding(runs=2, slots=3, blocks=7 + 14, found=[one, other])
    bench.engine.fixed.add(other)
    assert bench.preemption.yielding() == Yielding(runs=1, slots=1, blocks=7, found=[one])
    bench.state.draining = True
    assert bench.preemption.yielding() == Yielding(found=[])


def preempted_within(seconds: float, bench: Bench) -> int:
    """Run the periodic look of this worker in virtual time; return how many runs it stopped."""

    async def process(_machine: Machine) -> None:
        async with bench.tasks:
            bench.tasks.spawn(bench.preemption.run())

    with VirtualWorld(1, CALM) as world:
        world.process("P", process)
        world.run(seconds)
    return len(bench.engine.stopped)


def test_while_interactive_runs_grow_batch_runs_leave_some_blocks_free() -> None:
    full = Bench(batch_run(1), batch_run(2), interactive(3))
    full.engine.blocks_total = full.engine.blocks_used = 640
    assert preempted_within(1.5 * LOOK_S, full) == 1
    roomy = Bench(batch_run(1), interactive(3))
    roomy.engine.blocks_total, roomy.engine.blocks_used = 640, 630
    assert preempted_within(1.5 * LOOK_S, roomy) == 0
    alone = Bench(batch_run(1), batch_run(2))
    alone.engine.blocks_total = alone.engine.blocks_used = 640
    assert preempted_within(1.5 * LOOK_S, alone) == 0


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
