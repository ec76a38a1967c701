"""What an ingress tells the reader of a request whose deadline has passed."""

from __future__ import annotations

import pytest

from headrace.broker.codec import encode
from headrace.broker.errors import DeadlineExceeded
from headrace.broker.ingress.cancellation import Canceller, OpenJob
from headrace.broker.ingress.ingress import IngressTimers
from headrace.broker.ingress.stream import JobStream
from headrace.broker.messages.events import JobEvent
from headrace.broker.messages.frames import Frame, Row
from headrace.broker.messages.requests import Envelope
from headrace.broker.settings import IngressSettings
from tests.support.ingress_parts import SUBJECTS, Parts

ARRIVED = 1_000_000.0
ALLOWED_S = 90.0


class Bench:
    """One request "r" whose deadline is over."""

    def __init__(self) -> None:
        self.parts = parts = Parts()
        reader = parts.record.reader
        assert isinstance(reader, JobStream)
        self.stream = reader
        envelope = Envelope(id="r", pool="p", model="m", judge="j", deadline=ARRIVED + ALLOWED_S, created=ARRIVED, tokens=1)
        parts.open.add(OpenJob("r", "p", "_", encode(envelope), reader, 0.0, envelope.deadline))
        canceller = Canceller(parts.messages, SUBJECTS, parts.judge, parts.open, None, own="j")  # type: ignore[arg-type]
        self.timers = IngressTimers(
            parts.messages,  # type: ignore[arg-type]  # a stand-in with the methods that parts call
            SUBJECTS,
            parts.judge,
            parts.open,
            canceller,
            settings=IngressSettings(),
        )

    async def end(self) -> None:
        self.timers._end_overdue(1.0)
        while True:
            await self.stream.rows()


async def test_a_request_that_no_worker_began_waited_in_the_queue() -> None:
    with pytest.raises(DeadlineExceeded, match=r"waited 90\.0 s in the queue and never started"):
        await Bench().end()


async def test_a_request_that_was_answered_says_how_many_tokens_came() -> None:
    bench = Bench()
    bench.parts.judge.on_frame(Frame(worker="w", rows=[Row("r", 1, 5, 0, 0, [1, 2, 3], ["a", "b", "c"])]), 0.0)
    with pytest.raises(DeadlineExceeded, match=r"after 90\.0 s: the request had started and produced 3 tokens"):
        await bench.end()


async def test_a_request_in_its_prefill_has_started() -> None:
    bench = Bench()
    bench.parts.judge.on_event(JobEvent(kind="started", id="r", attempt=1, worker="w"))
    with pytest.raises(DeadlineExceeded, match="had started and produced 0 tokens"):
        await bench.end()
