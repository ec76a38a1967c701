"""What a router holds un-acked, and when it no longer does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from headrace.broker.codec import encode
from headrace.broker.errors import WireError
from headrace.broker.messages.requests import Envelope
from headrace.router.session.state import HeldRequest, RequestHead, RequestState, RequestWindow, decode_head


@dataclass(eq=False)
class FakeDelivery:
    stream_seq: int = 1
    data: bytes = b"12345"
    subject: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    num_delivered: int = 1
    pending: int = 0
    stored: float = 0.0
    said: list[str] = field(default_factory=list)

    def ack(self) -> None:
        self.said.append("ack")

    def nak(self, delay_s: float = 0.0) -> None:
        self.said.append("nak")

    def progress(self) -> None:
        self.said.append("progress")

    def term(self, reason: str = "") -> None:
        self.said.append("term")


def held(seq: int = 1, request_id: str = "a", request_class: str = "std") -> HeldRequest:
    head = RequestHead(id=request_id, judge="j", deadline=1.0, tokens=3)
    return HeldRequest(FakeDelivery(seq), head, 1, [], request_class)  # type: ignore[arg-type]


def test_a_head_is_an_envelope_without_its_payload() -> None:
    body = encode(
        Envelope(
            id="a", pool="p", model="m", judge="j", deadline=2.0, created=1.0, tokens=7, payload=b"x" * 99, session="s",
            affinity="hard", worker="w", require=["l"], prefer={"p": 2.0}, adapter="d", hashes=b"12345678", block_size=4,
        )
    )  # fmt: skip
    head = decode_head(body)
    assert (head.id, head.judge, head.deadline, head.created, head.tokens) == ("a", "j", 2.0, 1.0, 7)
    assert (head.session, head.affinity, head.worker, head.require, head.prefer) == ("s", "hard", "w", ["l"], {"p": 2.0})
    assert (head.adapter, head.hashes, head.block_size) == ("d", b"12345678", 4)
    with pytest.raises(WireError):
        decode_head(b"\x80")


def test_every_routing_field_of_an_envelope_is_in_the_head() -> None:
    left_out = {"pool", "model", "payload", "spill", "kind"}
    assert set(Envelope.__struct_fields__) - left_out == set(RequestHead.__struct_fields__)


async def test_it_counts_requests_and_bytes_by_class() -> None:
    window = RequestWindow("p", ack_wait_s=3.0)
    one, two = held(1, "a"), held(1, "b", "re")
    window.add(one)
    window.add(two)
    assert (len(window), window.bytes, window.counts.get("std", 0), window.counts.get("re", 0), window.counts.get("hi", 0)) == (
        2,
        10,
        1,
        1,
        0,
    )
    assert window.of("b") is two
    assert window.remove(one)
    assert not window.remove(one)
    assert (len(window), window.bytes, window.counts.get("std", 0), one.state) == (1, 5, 0, RequestState.GONE)


async def test_a_redelivered_message_replaces_the_handle_and_nothing_else() -> None:
    window = RequestWindow("p", ack_wait_s=3.0)
    one = held(7)
    window.add(one)
    again = FakeDelivery(7)
    assert window.redelivered(again, "std")
    assert one.delivery is again
    assert not window.redelivered(FakeDelivery(7), "re")  # moved requests lie in another stream
    assert not window.redelivered(FakeDelivery(8), "std")
    window.add(held(9, "moved", "rb"))
    assert window.redelivered(FakeDelivery(9), "re")
    assert not window.redelivered(FakeDelivery(9), "batch")


async def test_another_message_under_a_held_sequence_is_told_from_a_redelivery() -> None:
    window = RequestWindow("p", ack_wait_s=3.0)
    one = held(7)
    window.add(one)
    assert window.displaced(FakeDelivery(7), "std") is None
    assert window.displaced(FakeDelivery(7, data=b"another"), "std") is one
    assert window.displaced(FakeDelivery(7, data=b"another"), "re") is None


async def test_two_requests_of_one_id_are_never_held_together() -> None:
    window = RequestWindow("p", ack_wait_s=3.0)
    window.add(held(1))
    with pytest.raises(KeyError):
        window.add(held(2))


async def test_what_was_not_extended_in_time_is_ours_no_more() -> None:
    window = RequestWindow("p", ack_wait_s=0.05)
    one = held(1)
    window.add(one)
    window.extend()
    assert window.claims_valid
    assert one.delivery.said == ["progress"]  # type: ignore[attr-defined]
    await asyncio.sleep(0.06)
    assert not window.claims_valid
    window.restart_claims()
    assert window.claims_valid


async def test_the_age_of_a_window_is_that_of_its_oldest_request() -> None:
    window = RequestWindow("p", ack_wait_s=30.0)
    assert window.oldest_s(100.0) == 0.0
    created = {"a": 97.0, "b": 90.0, "c": 99.0}
    for seq, (request_id, at) in enumerate(created.items(), 1):
        head = RequestHead(id=request_id, judge="j", deadline=1.0, created=at, tokens=3)
        window.add(HeldRequest(FakeDelivery(seq), head, 1, [], "std"))  # type: ignore[arg-type]
    assert window.oldest_s(100.0) == 10.0
    assert window.oldest_s(80.0) == 0.0  # clocks of machines differ
    oldest = window.of("b")
    assert oldest is not None
    window.remove(oldest)
    assert window.oldest_s(100.0) == 3.0
