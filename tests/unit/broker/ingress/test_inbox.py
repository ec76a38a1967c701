"""Claims of an ingress's requests: which are decided at once, and which after a look at the suspects' leases."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from headrace.broker.codec import decode, encode
from headrace.broker.ingress.inbox import ClaimDecider, IngressInbox, forged_control, forged_frame
from headrace.broker.membership.members import drained_key
from headrace.broker.messages.control import (
    CancelJob,
    Carrying,
    Check,
    Claim,
    ClaimReply,
    HistoryEntry,
    Refuse,
    RunRef,
    SuspicionQuery,
)
from headrace.broker.messages.frames import Frame, JobFault, Row
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects, WorkerSubject, said_by
from tests.support.ingress_parts import SUBJECTS, Parts


class NoMembers:
    def worker_live(self, pool: str, worker: str) -> bool:
        return False


def claims(parts: Parts) -> ClaimDecider:
    return ClaimDecider(
        parts.messages,  # type: ignore[arg-type]
        SUBJECTS,
        parts.judge,
        parts.outbox,
        NoMembers(),  # type: ignore[arg-type]
        parts.tasks,
    )


def replies(parts: Parts) -> list[ClaimReply]:
    return [decode(ClaimReply, data) for subject, data in parts.messages.sent if subject == "reply"]


def claim(request_id: str = "r", *suspects: str) -> Claim:
    history = [HistoryEntry(number, worker) for number, worker in enumerate(suspects, start=1)]
    return Claim(id=request_id, attempt=len(suspects) + 1, run=7, worker="w9", history=history)


async def test_a_claim_without_suspects_is_decided_at_once() -> None:
    parts = Parts()
    claims(parts).on_claim(claim(), "reply")
    claims(parts).on_claim(claim("unheard-of"), "reply")
    assert [reply.verdict for reply in replies(parts)] == ["go", "unknown"]


async def test_only_suspects_without_lease_and_without_a_drain_count_as_crashed() -> None:
    parts = Parts()
    for number, worker in enumerate(("w1", "w2", "w3"), start=1):
        parts.record.hold(number, worker)
    parts.messages.stored = {SUBJECTS.worker_key("p", "w1"): b"lease", drained_key("w2"): b"1"}
    async with parts.tasks:
        claims(parts).on_claim(claim("r", "w1", "w2", "w3"), "reply")
        assert replies(parts) == []
    (reply,) = replies(parts)
    assert (reply.verdict, reply.crashes) == ("go", 1)


async def test_a_claim_with_suspects_gets_no_answer_from_an_ingress_that_does_not_run() -> None:
    parts = Parts()
    claims(parts).on_claim(claim("r", "w1"), "reply")
    assert replies(parts) == []


SENDER = WorkerSubject("p", "w")


class Reader:
    def take(self, _row: Row, _now_s: float) -> bool:
        return True

    def on_end(self, *_: object) -> None: ...


def judge() -> Judge:
    found = Judge(port=None)  # type: ignore[arg-type]  # nothing is said
    for request, pool in (("r", "p"), ("q", "other")):
        found.open(JobRecord(request, pool, 1, Reader(), 0.0))  # type: ignore[arg-type]
    return found


def frame(worker: str, *requests: str) -> Frame:
    return Frame(worker=worker, rows=[Row(request, 1, 7, 0, 0, [5], ["x"]) for request in requests])


def test_a_frame_counts_in_the_name_of_its_sender_and_for_its_pool() -> None:
    assert forged_frame(judge(), SENDER, frame("w", "r", "unknown")) == ""
    assert "in the name of v" in forged_frame(judge(), SENDER, frame("v", "r"))
    assert "a request of pool other" in forged_frame(judge(), SENDER, frame("w", "r", "q"))


@pytest.mark.parametrize(
    ("control", "why"),
    [
        (Claim(id="r", attempt=2, run=1, worker="w"), ""),
        (Claim(id="gone", attempt=2, run=1, worker="w"), ""),
        (Claim(id="r", attempt=2, run=1, worker="v"), "in the name of v"),
        (Claim(id="q", attempt=2, run=1, worker="w"), "of pool other"),
        (Check(worker="w", runs=[RunRef("r", 1, 1)]), ""),
        (Check(worker="v", runs=[RunRef("r", 1, 1)]), "in the name of v"),
        (Check(worker="w", runs=[RunRef("r", 1, 1), RunRef("q", 1, 1)]), "of pool other"),
        (Refuse(id="r", attempt=1, fault=JobFault("deadline", "late")), ""),
        (Refuse(id="q", attempt=1, fault=JobFault("deadline", "late")), "of pool other"),
        (SuspicionQuery(id="r"), ""),
        (SuspicionQuery(id="q"), "of pool other"),
        (CancelJob(name="r", tenant="_"), "may not say that"),
        (Carrying(job="j", nonce="n"), "may not say that"),
    ],
)
def test_a_question_counts_in_the_name_of_its_sender_and_for_its_pool(control: Any, why: str) -> None:
    found = forged_control(judge(), SENDER, control)
    assert (why in found) if why else found == ""


def test_the_subject_names_the_sender() -> None:
    names = Subjects("hr").spoken_by("p", "w")
    assert said_by(names.out("i")) == said_by(names.judge("i")) == SENDER


async def test_an_inbox_drops_what_is_said_in_the_name_of_others() -> None:
    parts = Parts()
    inbox = IngressInbox(parts.judge, parts.outbox, parts.owner, claims(parts), parts.timelines, lambda _job, _nonce: False)
    names = Subjects("hr").spoken_by("p", "w")
    with capture_logs() as logs:
        inbox.on_named_frame(Message(names.out("i"), encode(frame("v", "r")), "", None))
        inbox.on_named_control(Message(names.judge("i"), encode(Check(worker="v", runs=[RunRef("r", 1, 1)])), "back", None))
        assert parts.messages.sent == []
        assert [line["event"] for line in logs] == ["message.forged"] * 2
        inbox.on_named_control(Message(names.judge("i"), encode(Check(worker="w", runs=[RunRef("r", 1, 1)])), "back", None))
    assert [subject for subject, _ in parts.messages.sent] == ["back"]
