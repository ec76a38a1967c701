"""What a worker says to an ingress counts in its own name and for requests of its own pool only."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from headrace.broker.codec import encode
from headrace.broker.ingress.inbox import IngressInbox
from headrace.broker.ingress.named_senders import forged_control, forged_frame
from headrace.broker.ingress.story_book import StoryBook
from headrace.broker.messages import CancelJob, Carrying, Check, Claim, Frame, JobFault, Refuse, Row, RunRef, SuspicionQuery
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects, WorkerSubject, said_by
from tests.support.ingress_parts import Parts

SENDER = WorkerSubject("p", "w")


class Reader:
    def take(self, _row: Row) -> bool:
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
    nothing: Any = None
    inbox = IngressInbox(parts.judge, parts.open, parts.outbox, nothing, nothing, nothing, StoryBook("i"))
    names = Subjects("hr").spoken_by("p", "w")
    with capture_logs() as logs:
        inbox.on_named_frame(Message(names.out("i"), encode(frame("v", "r")), "", None))
        inbox.on_named_control(Message(names.judge("i"), encode(Check(worker="v", runs=[RunRef("r", 1, 1)])), "back", None))
        assert parts.messages.sent == []
        assert [line["event"] for line in logs] == ["message.forged"] * 2
        inbox.on_named_control(Message(names.judge("i"), encode(Check(worker="w", runs=[RunRef("r", 1, 1)])), "back", None))
    assert [subject for subject, _ in parts.messages.sent] == ["back"]
