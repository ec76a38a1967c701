"""A job's name is of one request. A cancel ends a job as its one compare-and-set says, be it a plain or a durable one."""

from __future__ import annotations

import pytest

from headrace.broker.codec import decode, encode
from headrace.broker.durable import stored_jobs
from headrace.broker.durable.errors import JobNameReused
from headrace.broker.durable.results import encode_result
from headrace.broker.durable.stored_jobs import DIGEST_TTL_S, JobCanceller, RequestDigests
from headrace.broker.messages.durable import JobResult, JobStatus, StreamEntry
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.support.memory_store import MemoryMessaging
from tests.unit.broker.durable.fakes import FakeStreams

ENTRIES, RESULT = "hr.rsp.t.j", "hr.result.t.j"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_jobs, "CARRIER_FIRST_S", 0.0)


async def cancelled(streams: FakeStreams) -> JobStatus:
    canceller = JobCanceller(streams, Subjects("hr"), wall=lambda: 1.0)  # type: ignore[arg-type]
    return await canceller.cancel("t", "j")


async def test_a_job_without_an_end_is_cancelled_in_its_stream_and_its_result() -> None:
    streams = FakeStreams()
    assert await cancelled(streams) == "cancelled"
    assert [decode(StreamEntry, message.data).status for message in streams.of(ENTRIES)] == ["cancelled"]
    assert b'"status":"cancelled"' in streams.of(RESULT)[0].data


@pytest.mark.parametrize("status", ["done", "failed", "expired"])
async def test_the_canceller_of_a_plain_job_is_told_the_result_that_was_first(status: JobStatus) -> None:
    streams = FakeStreams()
    streams.put(RESULT, encode_result(JobResult(id="j", status=status)))
    assert await cancelled(streams) == status
    assert len(streams.of(RESULT)) == 1


@pytest.mark.parametrize("status", ["done", "failed"])
async def test_the_canceller_of_a_durable_stream_is_told_its_end_and_leaves_the_result_to_the_carrier(
    status: JobStatus,
) -> None:
    streams = FakeStreams()
    streams.put(ENTRIES, encode(StreamEntry(nonce="c", n=1, kind="end", status=status)))
    assert await cancelled(streams) == status
    assert streams.of(RESULT) == []


async def test_another_cancellation_whose_author_died_before_the_result_is_finished() -> None:
    streams = FakeStreams()
    streams.put(ENTRIES, encode(StreamEntry(nonce="c", n=1, kind="end", status="cancelled")))
    assert await cancelled(streams) == "cancelled"
    assert len(streams.of(RESULT)) == 1


async def test_a_job_has_the_digest_of_its_first_request_until_its_result_has_expired() -> None:
    messaging = MemoryMessaging()
    digests = RequestDigests(messaging, Subjects("hr"))  # type: ignore[arg-type]
    await digests.check("t", "j", "one")  # of an older version
    await digests.claim("t", "j", "one")
    await digests.claim("t", "j", "one")
    await digests.check("t", "j", "one")
    await digests.claim("other", "j", "two")
    for step in (digests.claim, digests.check):
        with pytest.raises(JobNameReused, match="'j' is the job of another request"):
            await step("t", "j", "two")
    topology = Topology(Subjects("hr"))
    assert topology.job_max_age_s + topology.result_max_age_s <= DIGEST_TTL_S
    messaging.clock.at += DIGEST_TTL_S + 1
    await digests.claim("t", "j", "two")
