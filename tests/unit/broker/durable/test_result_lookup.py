"""Reads of single results are joined, and each caller gets its own answer."""

import asyncio

import pytest

from headrace.broker.durable.result_lookup import ResultLookup
from headrace.broker.durable.result_store import ResultStore
from headrace.broker.messages import JobResult
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
