"""What a router does with each message that the server delivers."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.codec import decode, encode, job_headers
from headrace.broker.dead_letters import MOST_BYTES
from headrace.broker.messages.control import HistoryEntry, Suspicion, SuspicionQuery
from headrace.broker.messages.durable import Unreadable
from headrace.broker.messages.requests import Envelope
from headrace.jetstream.errors import JetStreamError, NoResponder
from headrace.jetstream.tasks import TaskScope
from headrace.router.session.intake import Assessor, Intake
from headrace.router.session.placing import Refuser
from headrace.router.session.state import RequestCredit, RequestRelease, RequestWindow
from tests.support.router.router_parts import router_deps, router_state
from tests.unit.router.session.test_window import FakeDelivery


class Scheduler:
    """Takes everything, and says what it was asked to forget."""

    def __init__(self) -> None:
        self.offered: list[str] = []
        self.suspects: list[str] = []
        self.assessed: list[tuple[str, int, int]] = []
        self.cancelled: list[str] = []

    def offer(self, waiting: Any, now_s: float) -> None:
        self.offered.append(waiting.id)
        self.suspects += [waiting.id] * waiting.suspect

    def assess(self, request_id: str, *, limit: int, crashes: int) -> None:
        self.assessed.append((request_id, limit, crashes))

    def cancel(self, ids: list[str]) -> None:
        self.cancelled += ids


def request(request_id: str, seq: int, *history: HistoryEntry) -> FakeDelivery:
    body = encode(Envelope(id=request_id, pool="p", model="m", judge="j", deadline=2e9, created=1.0, tokens=7, payload=b"x"))
    return FakeDelivery(seq, body, headers=job_headers(1 + len(history), history))


class Sent:
    """A connection that keeps what it was told to send, and a judge behind it."""

    def __init__(self, answer: bytes | JetStreamError | None = None) -> None:
        self.letters: list[tuple[str, bytes]] = []
        self.asked: list[SuspicionQuery] = []
        self._answer = answer

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        assert subject == "hr.judge.j"
        self.asked.append(decode(SuspicionQuery, data))
        if isinstance(self._answer, bytes):
            return self._answer
        raise self._answer or NoResponder(subject)

    def send(self, subject: str, data: bytes) -> None:
        self.letters.append((subject, data))


def intake_of(window: RequestWindow, scheduler: Scheduler, sent: Sent | None = None, tasks: TaskScope | None = None) -> Intake:
    tasks = tasks or TaskScope()
    deps = router_deps(sent or Sent(), wall=lambda: 1234.5)
    state = router_state(scheduler, window)
    credit = RequestCredit(deps.options, state)
    refuser = Refuser(deps, tasks, state.permission, RequestRelease(state, credit))
    return Intake(deps, state, credit, refuser, Assessor(deps, tasks, state))


async def test_a_request_under_the_sequence_of_one_from_before_the_stream_was_made_again_is_taken() -> None:
    window, scheduler = RequestWindow("p", ack_wait_s=3.0), Scheduler()
    intake = intake_of(window, scheduler)
    old, new, again = request("old", 7), request("new", 7), request("new", 7)
    for delivery in (old, new, again):
        intake._on_delivery(delivery, "std")
    assert [held.id for held in window] == ["new"]
    assert (scheduler.offered, scheduler.cancelled) == (["old", "new"], ["old"])
    assert old.said == new.said == []  # an ack of the old one would be one of the new one


async def test_a_request_that_cannot_be_read_becomes_a_dead_letter_and_does_not_come_again() -> None:
    window, scheduler, sent = RequestWindow("p", ack_wait_s=3.0), Scheduler(), Sent()
    intake = intake_of(window, scheduler, sent)
    garbage = FakeDelivery(8, b"\xc1" * 100_000, subject="hr.req.p.std.t")
    intake._on_delivery(garbage, "std")
    [(subject, data)] = sent.letters
    letter = decode(Unreadable, data)
    assert (subject, letter.subject, letter.at) == ("hr.dlq.p", "hr.req.p.std.t", 1234.5)
    assert letter.why
    assert letter.data == b"\xc1" * MOST_BYTES, "its beginning is kept"
    assert garbage.said == ["ack"]
    assert scheduler.offered == []
    intake._on_delivery(request("right", 9), "std")
    assert scheduler.offered == ["right"]


CRASHES = (HistoryEntry(1, "w1", 30), HistoryEntry(2, "w2", 25))


@pytest.mark.parametrize(
    ("answer", "assessed"),
    [
        (encode(Suspicion()), (0, 0)),
        (encode(Suspicion(limit=3, crashes=2)), (3, 2)),
        (None, (5, 2)),  # no judge: what the history says at worst
        (b"\xc1", (5, 2)),
    ],
)
async def test_the_judge_of_a_request_with_several_crashes_is_asked_how_suspect_it_is(
    answer: bytes | None, assessed: tuple[int, int]
) -> None:
    window, scheduler, sent = RequestWindow("p", ack_wait_s=3.0), Scheduler(), Sent(answer)
    async with TaskScope() as tasks:
        intake = intake_of(window, scheduler, sent, tasks)
        intake._on_delivery(request("one", 1, CRASHES[0]), "re")
        intake._on_delivery(request("two", 2, *CRASHES), "re")
    assert (scheduler.offered, scheduler.suspects) == (["one", "two"], ["two"])
    assert [(query.id, query.history) for query in sent.asked] == [("two", list(CRASHES))]
    assert scheduler.assessed == [("two", *assessed)]
