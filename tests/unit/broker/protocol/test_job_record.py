"""The record of an open request."""

from __future__ import annotations

from headrace.broker.ingress.timeline import RequestTimeline
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import JobFault, Row
from headrace.broker.protocol.job_record import JobRecord
from tests.support.garbage import left_to_the_collector
from tests.support.timelines import CARD


class Reader:
    """A stream as an ingress keeps it: it knows the timeline of its request, which knows the record."""

    timeline: RequestTimeline

    def take(self, row: Row, now_s: float) -> bool:
        return True

    def end(self, fault: JobFault | None) -> None:
        self.timeline.end(fault, 6.0, "i")


def test_a_request_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    def judge() -> None:
        reader = Reader()
        record = JobRecord("r", "p", 1, reader, 5.0)
        reader.timeline = RequestTimeline(Job(id="r", card=CARD, prompt_tokens=5), record, 5.0, 0.0)
        record.end(None)
        assert reader.timeline.story is not None

    assert left_to_the_collector(judge) == 0
