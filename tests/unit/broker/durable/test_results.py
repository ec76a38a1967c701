"""Reads of single results are joined, and each caller gets its own answer."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.codec import decode, encode
from headrace.broker.durable.names import JobRef
from headrace.broker.durable.results import OutsideEnds, ResultLookup, ResultStore, decode_result, refused
from headrace.broker.messages.durable import JobResult, StreamEntry
from headrace.broker.messages.frames import JobFault
from headrace.jetstream.errors import NotConnected
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.unit.broker.durable.fakes import FakeStreams


class CountedStreams(FakeStreams):
    reads = 0

    async def last_messages(self, stream: str, subjects: list[str]) -> list:  # type: ignore[override, type-arg]
        self.reads += 1
        await asyncio.sleep(0)
        return await super().last_messages(stream, subjects)


async def test_jobs_that_ask_in_one_turn_share_one_read() -> None:
    streams = CountedStreams()
    results = ResultStore(streams, Subjects("hr"))  # type: ignore[arg-type]
    await results.commit("t", "a", JobResult(id="a", status="done"))
    async with TaskScope() as tasks:
        lookup = ResultLookup(results, tasks)
        found = await asyncio.gather(lookup.get("t", "a"), lookup.get("t", "b"), lookup.get("u", "a"))
        assert [result.id if result is not None else None for result in found] == ["a", None, None]
        assert streams.reads == 1
        await lookup.get("t", "a")
        assert streams.reads == 2


async def test_jobs_that_ask_during_a_read_share_the_next_one() -> None:
    streams = CountedStreams()
    results = ResultStore(streams, Subjects("hr"))  # type: ignore[arg-type]
    await results.commit("t", "3", JobResult(id="3", status="done"))
    async with TaskScope() as tasks:
        lookup = ResultLookup(results, tasks)
        first = asyncio.ensure_future(lookup.get("t", "0"))
        while not streams.reads:
            await asyncio.sleep(0)
        later = [asyncio.ensure_future(lookup.get("t", str(n))) for n in range(1, 6)]
        found = await asyncio.gather(first, *later)
        assert [result.id if result is not None else None for result in found] == [None, None, None, "3", None, None]
        assert streams.reads == 2


async def test_a_read_that_fails_fails_for_all_who_asked() -> None:
    streams = CountedStreams(["unread"])
    async with TaskScope() as tasks:
        lookup = ResultLookup(ResultStore(streams, Subjects("hr")), tasks)  # type: ignore[arg-type]
        answers = await asyncio.gather(lookup.get("t", "a"), lookup.get("t", "b"), return_exceptions=True)
        assert [type(answer) for answer in answers] == [NotConnected, NotConnected]


async def test_a_caller_that_gave_up_does_not_disturb_the_others() -> None:
    streams = CountedStreams()
    async with TaskScope() as tasks:
        lookup = ResultLookup(ResultStore(streams, Subjects("hr")), tasks)  # type: ignore[arg-type]
        gone = asyncio.ensure_future(lookup.get("t", "a"))
        stays = asyncio.ensure_future(lookup.get("t", "b"))
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays is None
        with pytest.raises(asyncio.CancelledError):
            await gone


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
