"""The record of an open request."""

from __future__ import annotations

from headrace.broker.ingress.timeline import Journey
from headrace.broker.messages.frames import JobFault, Row
from headrace.broker.protocol.job_record import JobRecord
from tests.support.garbage import left_to_the_collector


class Reader:
    """A stream as an ingress keeps it: it knows the journey of its request, which knows the record."""

    journey: Journey
    ended = False

    def take(self, row: Row) -> bool:
        return True

    def end(self, fault: JobFault | None) -> None:
        self.ended = True


def test_a_request_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    def judge() -> None:
        reader = Reader()
        record = JobRecord("r", "p", 1, reader, 5.0)
        reader.journey = Journey(record, 5.0)
        record.end(None)
        assert reader.ended

    assert left_to_the_collector(judge) == 0
