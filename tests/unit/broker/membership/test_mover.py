"""Moved jobs: the class in which the next attempt is stored."""

from __future__ import annotations

import pytest

from headrace.broker.codec import decode, encode, parse_job_headers
from headrace.broker.membership.mover import Mover
from headrace.broker.messages.control import Refuse
from headrace.broker.messages.durable import DeadLetter, Unreadable
from headrace.broker.messages.requests import Envelope
from headrace.broker.settings import Timing
from headrace.jetstream.errors import PayloadTooLarge
from headrace.jetstream.subjects import Subjects
from tests.support.ingress_parts import Messages

SUBJECTS = Subjects()


class Broker(Messages):
    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[int] = []

    async def delete_message(self, stream: str, seq: int) -> bool:
        self.deleted.append(seq)
        return True


@pytest.mark.parametrize(("before", "after"), [("hi", "re"), ("std", "re"), ("batch", "rb")])
async def test_a_moved_request_keeps_its_place_before_or_behind_interactive_ones(before: str, after: str) -> None:
    broker = Broker()
    mover = Mover(broker, SUBJECTS, pool="p", timing=Timing(), wall=lambda: 0.0)  # type: ignore[arg-type]
    envelope = Envelope(id="r", pool="p", model="m", judge="i", deadline=60.0, created=0.0, tokens=3, request_class=before)
    await mover.move(worker="w", seq=7, data=encode(envelope), headers=None, suspect=None, reason="drain")
    assert broker.published[0][0] == SUBJECTS.req("p", after)  # type: ignore[arg-type]
    assert parse_job_headers(broker.headers[0]) == (2, [])
    assert broker.deleted == [7]


async def test_a_message_that_cannot_be_moved_is_buried_and_its_judge_told() -> None:
    broker = Broker()
    mover = Mover(broker, SUBJECTS, pool="p", timing=Timing(), wall=lambda: 0.0)  # type: ignore[arg-type]
    await mover.move(worker="w", seq=7, data=b"\xc1", headers=None, suspect=None, reason="drain")
    assert decode(Unreadable, broker.sent[0][1]).subject == "hr.work.p.w"
    broker.failing = [PayloadTooLarge("headers")]
    envelope = Envelope(id="r", pool="p", model="m", judge="i", deadline=60.0, created=0.0, tokens=3)
    await mover.move(worker="w", seq=8, data=encode(envelope), headers=None, suspect="w", reason="drain")
    (told, refusal), (where, letter) = broker.sent[1:]
    assert (told, decode(Refuse, refusal).attempt) == ("hr.judge.i", 2)
    assert (where, decode(DeadLetter, letter).envelope.id) == ("hr.dlq.p", "r")
    assert broker.deleted == [7, 8]
