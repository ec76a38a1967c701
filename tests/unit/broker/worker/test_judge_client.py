"""A worker's questions to judges and to the object store: what no answer means, and for whom."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from headrace.broker.codec import decode_ingress_control, encode
from headrace.broker.errors import BrokerError
from headrace.broker.messages import Check, CheckReply, ClaimReply, Envelope, Spill
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.trial import Turn
from headrace.broker.settings import SessionSettings, Timing
from headrace.broker.spill import fetch_payload
from headrace.broker.worker.judge_client import JudgeClient
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import NotConnected, ObjectNotFound, RequestTimeout
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.protocol.test_runs import make

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
