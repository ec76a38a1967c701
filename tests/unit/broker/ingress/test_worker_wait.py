"""A request for which there is no worker is held, and let go when one comes, when its time is up, or when it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.errors import JobRefused
from headrace.broker.ingress.waits import WorkerWait
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Frame, JobFault, Row
from headrace.broker.messages.requests import Envelope
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.errors import NotConnected
from headrace.jetstream.ports import PubAck, StoredMessage
from tests.support.ingress_parts import DEADLINE, Parts

CARD = ModelCard(model="m", pool="p", context_length=64, block_size=16)
LONG_S = 1000.0


class FakeMembers:
    """`serving` has the (pool, adapter) pairs that some worker has."""

    def __init__(self) -> None:
        self.serving: set[tuple[str, str]] = set()
        self.callback: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def having(self, pool: str, adapter: str) -> list[str]:
        return ["w"] if (pool, adapter) in self.serving else []

    def waking(self, pool: str, adapter: str) -> bool:
        return False

    def come(self, pool: str, adapter: str = "") -> None:
        self.serving.add((pool, adapter))
        self.callback()


class FakeQueue:
    """The stored messages by sequence; `away` while the server cannot be reached."""

    def __init__(self) -> None:
        self.stored: dict[int, bytes] = {}
        self.away = False
        self.asked = asyncio.Event()

    async def get_message(self, stream: str, seq: int) -> StoredMessage | None:
        self.asked.set()
        if self.away:
            raise NotConnected
        data = self.stored.get(seq)
        return None if data is None else StoredMessage("s", seq, data)

    async def delete_message(self, stream: str, seq: int) -> bool:
        return self.stored.pop(seq, None) is not None


def stored_copy(request_id: str = "r") -> bytes:
    return encode(Envelope(id=request_id, pool="p", model="m", judge="j", deadline=DEADLINE, created=0.0, tokens=1))


def job(deadline_s: float = LONG_S, adapter: str = "") -> Job:
    return Job(id="r", card=CARD, prompt_tokens=1, deadline_s=deadline_s, adapter=adapter)


class Bench:
    """One stored request "r" of pool "p", and what holds it."""

    def __init__(self, longest_s: float) -> None:
        self.parts = Parts()
        self.members = FakeMembers()
        self.queue = FakeQueue()
        self.queue.stored[7] = stored_copy()
        self.wait = WorkerWait(self.queue, self.members, self.parts.judge, self.parts.owner, longest_s=longest_s)  # type: ignore[arg-type]

    def hold(self, wanted: Job) -> None:
        self.wait.hold(wanted, PubAck("REQ", 7), asyncio.get_running_loop().time())

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not met():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def bench(longest_s: float = LONG_S) -> AsyncIterator[Bench]:
    made = Bench(longest_s)
    running = asyncio.create_task(made.wait.run())
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def ended(outcome: str) -> float:
    return metrics.HELD_ENDED.labels(outcome)._value.get()


async def test_a_request_whose_time_is_up_is_refused_and_leaves_the_queue() -> None:
    async with bench(longest_s=0.02) as made:
        before = ended("no_worker")
        made.hold(job())
        with pytest.raises(JobRefused, match=r"'m' has no ready worker, and none came in 0\.\d s") as refused:
            await made.parts.stream.rows()
        assert (refused.value.reason, refused.value.retry_after_s) == ("no_worker", 1.0)
        await made.until(lambda: not made.queue.stored)
        assert (len(made.wait), ended("no_worker")) == (0, before + 1)


async def test_no_request_is_held_beyond_its_deadline() -> None:
    async with bench() as made:
        made.hold(job(deadline_s=0.02, adapter="sql"))
        with pytest.raises(JobRefused, match="'sql' has no ready worker"):
            await made.parts.stream.rows()


async def test_a_worker_that_comes_releases_the_requests_of_its_pool_and_adapters_only() -> None:
    async with bench(longest_s=0.05) as made:
        before = ended("worker")
        made.hold(job())
        made.members.come("other")
        assert len(made.wait) == 1
        made.members.come("p")
        assert (len(made.wait), ended("worker")) == (0, before + 1)
        made.hold(job(adapter="sql"))  # the worker that came has it not
        assert len(made.wait) == 1
        made.members.come("p", "sql")
        await asyncio.sleep(0.1)
        assert made.parts.judge.get("r") is not None
        assert made.queue.stored


async def test_nothing_is_held_for_which_there_is_a_worker() -> None:
    async with bench() as made:
        made.members.come("p")
        made.hold(job())
        assert len(made.wait) == 0


async def test_where_none_may_be_held_a_request_whose_worker_left_before_the_ack_is_not_refused() -> None:
    async with bench(longest_s=0.0) as made:
        made.hold(job())
        await asyncio.sleep(0.05)
        assert len(made.wait) == 0
        assert made.parts.judge.get("r") is not None
        assert made.queue.stored


async def test_a_request_that_ends_meanwhile_is_forgotten_and_leaves_the_queue() -> None:
    async with bench() as made:
        before = ended("ended")
        made.hold(job())
        made.parts.owner.end("r", JobFault("cancelled", "the client left"), cause="client")
        await made.until(lambda: not made.queue.stored)
        assert (len(made.wait), ended("ended")) == (0, before + 1)


async def test_a_request_that_some_worker_runs_is_held_no_longer() -> None:
    """Its tokens may be quicker here than the worker's lease."""
    async with bench(longest_s=0.05) as made:
        made.parts.judge.on_frame(Frame(worker="w", rows=[Row("r", 1, 5, 0, 0, [1], ["a"])]), 0.0)
        made.hold(job())
        await made.until(lambda: not len(made.wait))
        assert made.parts.judge.get("r") is not None
        assert made.queue.stored


async def test_a_message_that_is_another_requests_by_now_is_left_alone() -> None:
    async with bench(longest_s=0.001) as made:
        made.queue.stored[7] = stored_copy("another")
        made.hold(job())
        with pytest.raises(JobRefused):
            await made.parts.stream.rows()
        await made.queue.asked.wait()
        await asyncio.sleep(0)
        assert made.queue.stored


async def test_a_server_that_is_away_keeps_no_request_from_being_refused() -> None:
    async with bench(longest_s=0.001) as made:
        made.queue.away = True
        made.hold(job())
        with pytest.raises(JobRefused):
            await made.parts.stream.rows()
        await made.queue.asked.wait()
        made.queue.away = False
        made.parts.judge.open(made.parts.record)
        made.hold(job())
        await made.until(lambda: not made.queue.stored)  # what could not be removed before did not end the removing
        assert made.parts.judge.get("r") is None
