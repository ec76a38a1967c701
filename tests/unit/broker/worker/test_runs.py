"""Runs of a worker: what no answer of a judge means, how each run begins and ends, once, and what time asks for."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from headrace.broker.codec import decode_ingress_control, encode
from headrace.broker.errors import BrokerError
from headrace.broker.messages.control import Check, CheckReply, ClaimReply, HistoryEntry
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Envelope, Spill
from headrace.broker.protocol.preemption import Yielding
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import Turn
from headrace.broker.settings import Timing
from headrace.broker.spill import fetch_payload
from headrace.broker.worker.runs import Admission, JudgeClient
from headrace.jetstream.errors import NotConnected, ObjectNotFound, RequestTimeout
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.protocol.test_protocol_runs import FakeDelivery, make
from tests.unit.broker.worker.bench import Bench

SUBJECTS = Subjects("hr")
FAULT = JobFault("engine_busy", "try elsewhere", retriable=True)


def client_of(judge: FarJudge | SlowJudge) -> JudgeClient:
    bench = Bench(timing=Timing(retry_s=0.0))
    bench.world.request = judge.request
    return JudgeClient(bench.deps, bench.presence)


def one_run(attempt: int = 1) -> tuple[Bench, Run]:
    run = make(1, attempt=attempt)
    run.begin([], [])
    return Bench(run), run


def acked(run: Run) -> int:
    assert isinstance(run.delivery, FakeDelivery)
    return run.delivery.acked


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
    assert (await client_of(judge).check(runs))[runs[1]] == "current"


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


async def test_a_started_run_is_in_the_engine_and_told_of() -> None:
    bench, run = one_run()
    bench.runs.start(run, b"payload")
    assert (bench.world.started, run.state, bench.world.events) == ([run], RunState.RUNNING, ["started"])


@pytest.mark.parametrize("started", [False, True])
async def test_a_dropped_run_is_acked_and_its_slot_is_free(*, started: bool) -> None:
    bench, run = one_run()
    if started:
        bench.runs.start(run, b"")
    bench.runs.drop(run, how="done")
    bench.runs.drop(run, how="done")
    assert (acked(run), run.gone, bench.changes) == (1, True, [4])
    assert bench.world.stopped == [run] * started, "an engine is asked to stop only what it was given"
    assert bench.world.events == ["started"] * started + ["settled"]


async def test_a_moved_run_is_stopped_moved_and_not_acked() -> None:
    bench, run = one_run()
    bench.runs.start(run, b"")
    await bench.runs.move(run, suspect="w#engine", reason="engine_died", group=3)
    await bench.runs.move(run, suspect=None, reason="again")
    bench.runs.drop(run, how="late")
    assert bench.world.moved == [(1, "w#engine", "engine_died", 3)]
    assert (acked(run), run.gone, bench.world.stopped) == (0, True, [run])


async def test_while_it_is_moved_nothing_else_ends_it() -> None:
    bench, run = one_run()
    bench.runs.start(run, b"")
    moving = bench.runs.move(run, suspect=None, reason="drain")
    run.move()
    bench.runs.drop(run, how="cancelled")
    await moving
    assert (acked(run), run.state, bench.world.moved) == (0, RunState.MOVING, [])


async def test_a_displaced_run_is_stopped_without_an_ack_and_its_message_stored_again() -> None:
    """Its judge may not know that the stream was cut short."""
    bench, run = one_run()
    async with bench.tasks:
        bench.runs.start(run, b"")
        bench.runs.abandon(run)
    assert (acked(run), run.gone, bench.world.stopped) == (0, True, [run])
    assert bench.world.stored_again == [1]


@pytest.mark.parametrize(("attempt", "moved"), [(1, True), (2, True), (3, False), (1001, True), (1003, False)])
async def test_a_run_is_tried_elsewhere_until_its_generation_has_had_its_attempts(attempt: int, *, moved: bool) -> None:
    bench, run = one_run(attempt)
    async with bench.tasks:
        bench.runs.start(run, b"")
        bench.runs.retry_elsewhere(run, FAULT)
    assert bench.world.moved == ([(1, None, "engine_busy", 0)] if moved else [])
    assert (run.choices[0].fin is None) is moved


async def test_a_first_token_changes_the_load_and_nothing_else() -> None:
    bench, run = one_run()
    bench.runs.start(run, b"")
    bench.runs.prefilled(run, 7)
    assert (bench.world.events, bench.world.loads, bench.changes) == (["started", "prefilled"], 1, [])


async def test_a_request_for_a_worker_that_serves_none_is_moved_in_the_background() -> None:
    bench = Bench()
    async with bench.tasks:
        bench.runs.return_unserved(FakeDelivery(9))
        assert bench.world.moved == []
    assert bench.world.moved == [(9, None, "role", 0)]


@pytest.mark.parametrize(("crashes", "starts"), [(2, True), (3, True), (4, False), (9, False)])
async def test_the_patience_of_a_suspect_doubles_with_each_crash_after_the_third(crashes: int, *, starts: bool) -> None:
    beside, suspect = make(1, request_id="o"), make(2, request_id="s", attempt=3)
    beside.state = RunState.RUNNING
    bench = Bench(beside, suspect, timing=Timing(trial_alone_s=10.0))
    bench.runs.table.suspect(suspect, 1, crashes)
    admission = Admission(bench.deps, bench.presence, bench.runs, bench.tasks)
    waiting = asyncio.create_task(admission._turn_of(suspect, asyncio.get_running_loop().time() - 15.0))
    await asyncio.sleep(0)
    assert waiting.done() is starts
    if starts:
        assert waiting.result() == Turn(1, beside=True)
    waiting.cancel()


async def ended_by_time(now_s: float, *, wall_s: float) -> bool:
    """Look at these times at a run that came when the clocks were 5 and 1,000,000, with 30 s left."""
    run = make(1)
    run.begin([], [])
    run.state, run.due_s = RunState.RUNNING, 35.0
    Bench(run, wall_s=wall_s).runs._look_at_runs(now_s)
    fin = run.choices[0].fin
    assert fin is None or (fin.fault is not None and fin.fault.code == "deadline_exceeded")
    return fin is not None


@pytest.mark.parametrize("jump_s", [0.0, 3600.0, -3600.0])
async def test_a_run_ends_at_its_deadline_even_if_the_wall_clock_jumps(jump_s: float) -> None:
    assert not await ended_by_time(34.9, wall_s=1_000_029.9 + jump_s)
    assert await ended_by_time(35.0, wall_s=1_000_030.0 + jump_s)


class Absent:
    """Absent judges: `gone` answers whether they are gone for good."""

    def __init__(self, *runs: Run) -> None:
        self.bench = Bench(*runs)
        self.bench.world.live_judges = {"J1"}
        self.bench.world.ingress_gone = self._gone
        self.asked: list[str] = []
        self.gone: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def _gone(self, name: str) -> bool:
        self.asked.append(name)
        return await asyncio.shield(self.gone)

    async def look(self, now_s: float) -> None:
        self.bench.runs.look_for_judges(now_s)
        for _ in range(5):
            await asyncio.sleep(0)


def of_judge(seq: int, judge: str) -> Run:
    run = make(seq, request_id=f"q{seq}")
    run.judge = judge
    return run


async def test_runs_that_come_while_the_lease_is_read_stay() -> None:
    absent = Absent(of_judge(1, "J0"), of_judge(2, "J0"), of_judge(3, "J1"))
    table = absent.bench.runs.table
    async with absent.bench.tasks:
        await absent.look(10.0)
        table.add(of_judge(4, "J0"))  # the judge is back and has submitted again
        absent.gone.set_result(True)
    assert [run.seq for run in table] == [3, 4]


async def test_absent_judges_are_looked_for_once_in_a_while_and_keep_their_runs_if_their_lease_is_there() -> None:
    absent = Absent(of_judge(1, "J0"))
    absent.gone.set_result(False)
    async with absent.bench.tasks:
        for now_s in (10.0, 10.1, 10.0 + absent.bench.deps.timing.silence_s):
            await absent.look(now_s)
    assert absent.asked == ["J0", "J0"]
    assert len(absent.bench.runs.table) == 1


async def test_a_worker_on_trial_has_room_for_suspects_only() -> None:
    suspect = make(1, attempt=3, history=[HistoryEntry(1, "x", 15), HistoryEntry(2, "y", 20)])
    runs = Bench(suspect).runs
    assert (runs.free_slots, runs.load_report(1, Yielding()).slots) == (2, 0)
    runs.table.suspect(suspect, 1, 2)
    assert (runs.free_slots, runs.load_report(2, Yielding()).slots) == (0, 0)
    runs.table.clear(suspect)
    assert (runs.free_slots, runs.load_report(3, Yielding()).slots) == (3, 4)
