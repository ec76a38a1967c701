"""What a router does with each message that the server delivers."""

from __future__ import annotations

from typing import Any

from broker.codec import encode, job_headers
from broker.messages import Envelope
from broker.protocol.runs import Tombstones
from jetstream.subjects import Subjects
from router.options import SessionOptions
from router.session.intake import Intake
from router.session.window import Window
from tests.unit.router.test_window import FakeDelivery


class Scheduler:
    """Takes everything, and says what it was asked to forget."""

    def __init__(self) -> None:
        self.offered: list[str] = []
        self.cancelled: list[str] = []

    def offer(self, waiting: Any, now_s: float) -> None:
        self.offered.append(waiting.id)

    def cancel(self, ids: list[str]) -> None:
        self.cancelled += ids


def request(request_id: str, seq: int) -> FakeDelivery:
    body = encode(Envelope(id=request_id, pool="p", model="m", judge="j", deadline=2e9, created=1.0, tokens=7, payload=b"x"))
    return FakeDelivery(seq, body, headers=job_headers(1, []))


async def test_a_request_under_the_sequence_of_one_from_before_the_stream_was_made_again_is_taken() -> None:
    window, scheduler = Window("p", ack_wait_s=3.0), Scheduler()
    intake = Intake(
        None,  # type: ignore[arg-type]
        Subjects(),
        window,
        scheduler,  # type: ignore[arg-type]
        Tombstones(keep_s=60.0),
        pool="p",
        options=SessionOptions(),
        may_take=lambda: True,
        on_offered=lambda: None,
        refuse=lambda held, fault: None,
    )
    old, new, again = request("old", 7), request("new", 7), request("new", 7)
    for delivery in (old, new, again):
        intake._on_delivery(delivery, "std")
    assert [held.id for held in window] == ["new"]
    assert (scheduler.offered, scheduler.cancelled) == (["old", "new"], ["old"])
    assert old.said == new.said == []  # an ack of the old one would be one of the new one
