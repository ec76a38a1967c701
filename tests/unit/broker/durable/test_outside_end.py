"""Whoever ends a job from outside leaves both its end and its result, whatever the status."""

from __future__ import annotations

import pytest

from headrace.broker.codec import decode, encode
from headrace.broker.durable.names import JobRef
from headrace.broker.durable.outside_end import OutsideEnds
from headrace.broker.durable.result_store import ResultStore, decode_result
from headrace.broker.durable.results import refused
from headrace.broker.messages import JobFault, JobResult, StreamEntry
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.durable.fakes import FakeStreams

ENTRIES, RESULT = "hr.rsp.t.j", "hr.result.t.j"
JOB = JobRef(tenant="t", name="j", durable=True)
FAULT = JobFault("model_not_found", "no model")


def unknown_model() -> JobResult:
    return refused(JOB, status_code=404, code="model_not_found", message="no model", now=1.0)


async def ended(streams: FakeStreams, job: JobRef = JOB) -> str:
    names = Subjects("hr")
    ends = OutsideEnds(streams, names, ResultStore(streams, names), wall=lambda: 1.0)  # type: ignore[arg-type]
    return await ends.end(job, unknown_model(), FAULT)


@pytest.mark.parametrize("fault", ["", "loseack", "lose", "full"])
async def test_the_result_of_a_durable_stream_that_was_failed_from_outside_is_the_one_that_was_given(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.broker.durable.stream_writer.RETRY_S", 0.0)
    streams = FakeStreams([fault])
    assert await ended(streams) == "failed"
    assert [decode(StreamEntry, message.data).status for message in streams.of(ENTRIES)] == ["failed"]
    assert [decode_result(message.data) for message in streams.of(RESULT)] == [unknown_model()]


async def test_a_plain_job_gets_no_entry() -> None:
    streams = FakeStreams()
    assert await ended(streams, JobRef(tenant="t", name="j")) == "failed"
    assert not streams.of(ENTRIES)
    assert [decode_result(message.data) for message in streams.of(RESULT)] == [unknown_model()]


async def test_the_result_of_a_stream_that_a_carrier_has_failed_is_left_to_carriers() -> None:
    streams = FakeStreams()
    streams.put(ENTRIES, encode(StreamEntry(nonce="c", n=1, kind="end", status="failed")))
    assert await ended(streams) == "failed"
    assert not streams.of(RESULT)
