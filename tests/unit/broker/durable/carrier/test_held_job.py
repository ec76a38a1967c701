"""The table of held jobs, by stored sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.broker.durable.held_job import HeldJob, HeldJobs, has_precedence
from headrace.broker.durable.names import new_nonce
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.messages.durable import HEADER_CLASS, HEADER_DEADLINE, HEADER_JOB
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.durable.fakes import FakeStreams


@dataclass(eq=False)
class FakeDelivery:
    stream_seq: int
    num_delivered: int = 1
    data: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)


def held(seq: int, name: str = "j", *, tenant: str = "t", request_class: str = "batch", deadline: float = 100.0) -> HeldJob:
    headers = {HEADER_JOB: name, HEADER_CLASS: request_class, HEADER_DEADLINE: str(deadline)}
    job = parse_job(b"{}", headers, tenant=tenant, seq=seq, stored=0.0)
    return HeldJob(job, "m", FakeDelivery(seq), FakeStreams(), Subjects("hr"), nonce=new_nonce())  # type: ignore[arg-type]


def test_a_redelivery_only_replaces_the_ack_handle() -> None:
    table = HeldJobs()
    one = held(5)
    table.add(one)
    again = FakeDelivery(5, 2)
    assert table.redelivered(again)  # type: ignore[arg-type]
    assert one.delivery is again  # type: ignore[comparison-overlap]
    assert one.num_delivered == 1
    assert not table.redelivered(FakeDelivery(6))  # type: ignore[arg-type]


def test_another_message_under_the_same_sequence_displaces_the_old_one() -> None:
    table = HeldJobs()
    old, new = held(5), held(5, "other")
    table.add(old)
    assert not table.redelivered(FakeDelivery(5, data=b"{ }"))  # type: ignore[arg-type]
    assert table.add(new) is old
    assert list(table) == [new]
    assert table.count("m") == 1
    table.remove(old)
    assert list(table) == [new]


def test_of_two_copies_that_are_checked_at_once_exactly_one_goes_on() -> None:
    one, two = held(1), held(2)
    one.phase = two.phase = "starting"
    assert has_precedence(one, two.nonce) != has_precedence(two, one.nonce)
    one.phase = "running"
    assert has_precedence(one, two.nonce)
    assert not has_precedence(one, one.nonce)
    one.phase = "waiting"
    assert not has_precedence(one, two.nonce)
    assert has_precedence(one, ""), "who asks without a delivery asks whether it is held at all"


def test_a_job_is_halted_once() -> None:
    one = held(1)
    one.halt("cancelled")
    one.halt("expired")
    assert one.stop == "cancelled"
    assert one.wake.is_set()
