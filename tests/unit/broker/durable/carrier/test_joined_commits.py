"""Results that come at about the same time are stored together, and none of them depends on another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headrace.broker.durable import results as result_store
from headrace.broker.durable.job_end import JoinedCommits
from headrace.broker.durable.results import LARGEST, ResultStore
from headrace.broker.messages.durable import JobResult
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Outgoing, PubAck
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.durable.fakes import FakeStreams
from tests.unit.broker.durable.test_result_store import answer

GAP_S = 0.001


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_store, "RETRY_S", 0.0)


class Streams(FakeStreams):
    """Counts the results that were published together."""

    def __init__(self, faults: Sequence[str] = ()) -> None:
        super().__init__(faults)
        self.groups: list[int] = []
        self.broken = False

    async def publish_all(self, messages: Sequence[Outgoing], *, timeout_s: float = 2.0) -> list[PubAck | JetStreamError]:
        self.groups.append(len(messages))
        if self.broken:
            raise TypeError("a fault of the program")
        return await super().publish_all(messages, timeout_s=timeout_s)


def commits(streams: Streams) -> JoinedCommits:
    return JoinedCommits(ResultStore(streams, Subjects("hr")), GAP_S)  # type: ignore[arg-type]


async def commit_all(streams: Streams, results: Sequence[JobResult]) -> list[JobResult | BaseException]:
    joined = commits(streams)
    return await asyncio.gather(*(joined.commit("t", result.id, result) for result in results), return_exceptions=True)


async def test_results_of_one_moment_are_stored_together() -> None:
    streams = Streams()
    results = [answer(f"j{number}") for number in range(5)]
    assert await commit_all(streams, results) == results
    assert streams.groups == [5]


async def test_each_group_is_followed_by_another_for_those_who_come_later() -> None:
    streams = Streams()
    joined = commits(streams)
    for name in ("a", "b"):
        assert await joined.commit("t", name, answer(name)) == answer(name)
    assert streams.groups == [1, 1]


@pytest.mark.parametrize("fault", ["full", "lose", "loseack"])
async def test_one_that_is_not_stored_at_once_is_committed_by_itself(fault: str) -> None:
    streams = Streams(["", fault])
    results = [answer(f"j{number}") for number in range(3)]
    assert await commit_all(streams, results) == results
    assert [len(streams.of(f"hr.result.t.j{number}")) for number in range(3)] == [1, 1, 1]


async def test_of_two_results_of_one_job_both_are_told_the_first() -> None:
    streams = Streams()
    joined = commits(streams)
    first, second = answer("first"), answer("second")
    assert await asyncio.gather(joined.commit("t", "j", first), joined.commit("t", "j", second)) == [first, first]


async def test_a_large_result_lies_in_an_object() -> None:
    streams = Streams()
    small, large = await commit_all(streams, [answer("small"), answer("large", LARGEST)])
    assert isinstance(large, JobResult)
    assert large.object is not None
    assert small == answer("small")
    assert streams.groups == [1]


@pytest.mark.parametrize("first", [True, False], ids=["the one that stores", "another one"])
async def test_one_that_is_cancelled_takes_no_other_with_it(first: bool) -> None:
    streams = Streams()
    joined = commits(streams)
    tasks = [asyncio.create_task(joined.commit("t", f"j{number}", answer(f"j{number}"))) for number in range(3)]
    await asyncio.sleep(0)
    gone = tasks.pop(0 if first else 2)
    gone.cancel()
    async with asyncio.timeout(10):
        done = await asyncio.gather(*tasks)
    assert [result.id for result in done] == (["j1", "j2"] if first else ["j0", "j1"])
    assert gone.cancelled() or await asyncio.wait([gone])


async def test_a_fault_of_the_one_that_stores_leaves_the_others_to_themselves() -> None:
    streams = Streams()
    streams.broken = True
    failed, *others = await commit_all(streams, [answer(f"j{number}") for number in range(3)])
    assert isinstance(failed, TypeError)
    assert others == [answer("j1"), answer("j2")]
