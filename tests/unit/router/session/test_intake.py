"""What a router does with each message that the server delivers, and which sleeping worker it wakes for what waits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.codec import decode, encode, job_headers
from headrace.broker.dead_letters import MOST_BYTES
from headrace.broker.messages.control import HistoryEntry, Suspicion, SuspicionQuery
from headrace.broker.messages.durable import Unreadable
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import Envelope
from headrace.jetstream.errors import JetStreamError, NoResponder
from headrace.jetstream.tasks import TaskScope
from headrace.router.session.intake import Intake, worker_to_wake
from headrace.router.session.placing import Refuser
from headrace.router.session.window import RequestHead, RequestWindow
from tests.support.router.router_parts import FakeDelivery, request_window, router_deps


def wants(**demands: Any) -> RequestHead:
    return RequestHead(id="r", judge="j", deadline=1.0, tokens=1, **demands)


def asleep(name: str, level: int = 1, **fields: object) -> WorkerMember:
    return WorkerMember(worker=name, pool="p", model="m", draining=True, sleeping=level, **fields)  # type: ignore[arg-type]


def awake(name: str, **fields: object) -> WorkerMember:
    return WorkerMember(worker=name, pool="p", model="m", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("waiting", "members", "chosen"),
    [
        ([], [asleep("a")], None),
        ([wants()], [asleep("b"), asleep("a")], "a"),
        ([wants()], [asleep("a", 2), asleep("b", 1)], "b"),
        ([wants()], [asleep("a"), awake("b")], None),
        ([wants()], [asleep("a"), awake("b", role="prefill")], "a"),
        ([wants()], [asleep("a", role="prefill")], None),
        ([wants()], [asleep("a"), awake("b", draining=True)], "a"),
        ([wants()], [asleep("a"), asleep("b", waking=True)], None),
        ([wants()], [awake("a", draining=True, paused=True)], None),
        ([wants(adapter="x")], [asleep("a"), asleep("b", adapters=["x"]), awake("c")], "b"),
        ([wants(require=["fast"])], [asleep("a"), asleep("b", labels=["fast", "new"]), awake("c", labels=["new"])], "b"),
        ([wants(worker="b")], [asleep("a"), asleep("b"), awake("c")], "b"),
        ([wants(), wants(adapter="x")], [asleep("b", adapters=["x"]), awake("c")], "b"),
        ([wants(adapter="y")], [asleep("a", adapters=["x"])], None),
    ],
)
def test_the_lightest_sleeper_that_may_take_what_no_other_may(
    waiting: list[RequestHead], members: list[WorkerMember], chosen: str | None
) -> None:
    assert worker_to_wake(waiting, members) == chosen


def test_one_that_was_asked_counts_as_up_and_one_that_failed_is_left_alone() -> None:
    members = [asleep("a"), asleep("b")]
    assert worker_to_wake([wants()], members, asked=["a"]) is None
    assert worker_to_wake([wants()], members, resting=["a"]) == "b"
    assert worker_to_wake([wants()], members, resting=["a", "b"]) is None


def any_member(name: str, level: int, waking: bool, draining: bool, adapters: list[str]) -> WorkerMember:
    stands: dict[str, object] = {"sleeping": level, "waking": waking and level > 0, "draining": draining or level > 0}
    return awake(name, adapters=adapters, **stands)


MEMBER = st.builds(
    any_member,
    st.sampled_from("abcdef"),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from("xy"), unique=True),
)
WANTS = st.builds(wants, adapter=st.sampled_from(["", "x", "y"]), worker=st.sampled_from(["", "a", "b"]), require=st.just([]))


@given(st.lists(WANTS, max_size=5), st.lists(MEMBER, max_size=6, unique_by=lambda member: member.worker))
def test_who_is_woken_sleeps_and_serves_a_request_that_nobody_else_takes(
    waiting: list[RequestHead], members: list[WorkerMember]
) -> None:
    def may(head: RequestHead, member: WorkerMember) -> bool:
        return head.worker in ("", member.worker) and (not head.adapter or head.adapter in member.adapters)

    chosen = worker_to_wake(waiting, members)
    left = [w for w in waiting if not any(may(w, m) for m in members if m.waking or not m.draining)]
    sleepers = {m.worker: m for m in members if m.sleeping and not m.waking}
    if chosen is None:
        assert not any(may(w, m) for w in left for m in sleepers.values())
    else:
        assert any(may(w, sleepers[chosen]) for w in left)


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


def intake_of(window: RequestWindow, sent: Sent | None = None, tasks: TaskScope | None = None) -> Intake:
    tasks = tasks or TaskScope()
    deps = router_deps(sent or Sent(), wall=lambda: 1234.5)
    return Intake(deps, tasks, window, Refuser(deps, tasks, window))


async def test_a_request_under_the_sequence_of_one_from_before_the_stream_was_made_again_is_taken() -> None:
    scheduler = Scheduler()
    window = request_window(scheduler)
    intake = intake_of(window)
    old, new, again = request("old", 7), request("new", 7), request("new", 7)
    for delivery in (old, new, again):
        intake._on_delivery(delivery, "std")
    assert [held.id for held in window] == ["new"]
    assert (scheduler.offered, scheduler.cancelled) == (["old", "new"], ["old"])
    assert old.said == new.said == []  # an ack of the old one would be one of the new one
    assert [held.delivery for held in window] == [again]  # only the last delivery can be acknowledged


async def test_a_request_that_cannot_be_read_becomes_a_dead_letter_and_does_not_come_again() -> None:
    scheduler, sent = Scheduler(), Sent()
    intake = intake_of(request_window(scheduler), sent)
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
    scheduler, sent = Scheduler(), Sent(answer)
    async with TaskScope() as tasks:
        intake = intake_of(request_window(scheduler), sent, tasks)
        intake._on_delivery(request("one", 1, CRASHES[0]), "re")
        intake._on_delivery(request("two", 2, *CRASHES), "re")
    assert (scheduler.offered, scheduler.suspects) == (["one", "two"], ["two"])
    assert [(query.id, query.history) for query in sent.asked] == [("two", list(CRASHES))]
    assert scheduler.assessed == [("two", *assessed)]
