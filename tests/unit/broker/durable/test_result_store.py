"""A job has one result, and all who ask see the same one."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.durable import results as result_store
from headrace.broker.durable.results import LARGEST, ResultStore, decode_result
from headrace.broker.messages.durable import JobResult, ResultResponse
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.durable.fakes import FakeStreams

FAULTS = st.lists(st.sampled_from(["", "", "full", "lose", "loseack", "stale", "unread"]), max_size=12)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_store, "RETRY_S", 0.0)


def store(streams: FakeStreams) -> ResultStore:
    return ResultStore(streams, Subjects("hr"))  # type: ignore[arg-type]


def answer(name: str, size: int = 10) -> JobResult:
    body = msgspec.Raw(b'"' + b"x" * size + b'"')
    return JobResult(id=name, status="done", response=ResultResponse(status_code=200, request_id="r", body=body))


@given(FAULTS, st.booleans(), st.booleans())
def test_one_of_two_results_stands_and_both_writers_are_told_which(faults: list[str], large: bool, late: bool) -> None:
    streams = FakeStreams(faults)
    results = store(streams)
    first, second = answer("first", LARGEST if large else 10), answer("second", LARGEST if late else 10)

    async def commit() -> tuple[JobResult, JobResult]:
        return await results.commit("t", "j", first), await results.commit("t", "j", second)

    told = asyncio.run(commit())
    assert told[0] == told[1]
    assert told[0].id == "first"
    [message] = streams.of("hr.result.t.j")
    assert decode_result(message.data) == told[0]
    named = told[0].object.name if told[0].object is not None else None
    assert set(streams.store.held) == ({named} if named is not None else set())
    assert asyncio.run(results.response(told[0])) == first.response


def test_a_full_stream_is_not_a_result() -> None:
    streams = FakeStreams(["full", "", "full", "", "full"])
    asyncio.run(store(streams).commit("t", "j", answer("mine")))
    assert len(streams.published) == 4
    assert len(streams.of("hr.result.t.j")) == 1


def test_an_object_is_kept_until_another_result_is_seen() -> None:
    streams = FakeStreams(["full", "unread", "loseack", "unread", "", "unread"])
    told = asyncio.run(store(streams).commit("t", "j", answer("mine", LARGEST)))
    assert told.object is not None
    assert list(streams.store.held) == [told.object.name]


def test_results_of_many_jobs_are_read_at_once() -> None:
    streams = FakeStreams()
    results = store(streams)

    async def read() -> dict[tuple[str, str], JobResult]:
        await results.commit("t", "a", answer("a"))
        await results.commit("u", "b", answer("b"))
        return await results.get_all([("t", "a"), ("t", "b"), ("u", "b")])

    found = asyncio.run(read())
    assert {key: result.id for key, result in found.items()} == {("t", "a"): "a", ("u", "b"): "b"}
    assert asyncio.run(results.get("t", "c")) is None


def test_a_result_that_cannot_be_read_is_a_failed_one() -> None:
    result = decode_result(b"{")
    assert result.status == "failed"
    assert result.error is not None
    assert result.error.code == "result_malformed"
