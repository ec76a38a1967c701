"""A carrier asks for the jobs that its pools can use, and for none during a pause, which always ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.durable.held_job import HeldJob, HeldJobs
from headrace.broker.durable.intake import RANKS, JobIntake, WaitingJobs
from headrace.broker.settings import CarrierSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.unit.broker.durable.carrier.test_held_job import held

SLOTS = 16
CREDIT = 32  # two jobs for each slot


class Pull:
    """A pull loop that gets nothing."""

    def __init__(self) -> None:
        self.credit = 0
        self.over = asyncio.Event()

    def add_credit(self, n: int = 1) -> None:
        self.credit += n

    async def run(self) -> None:
        await self.over.wait()


class Deployment:
    """One pool of one model."""

    def __init__(self) -> None:
        self.pull_loop = Pull()
        self.slots = SLOTS
        self.changed: Callable[[], None] = lambda: None

    def deps(self, **settings: Any) -> Any:
        members = SimpleNamespace(
            pools=lambda: ["m-12345678"],
            serving_workers=lambda pool: [SimpleNamespace(slots=self.slots)],
            ingresses=lambda: ["me"],
            on_change=self._on_change,
        )
        models = SimpleNamespace(listed_names=list, on_change=lambda callback: None)
        return SimpleNamespace(
            messaging=SimpleNamespace(pull=lambda *args, **options: self.pull_loop, ensure_consumer=self._ensure_consumer),
            subjects=Subjects("hr"),
            ingress=SimpleNamespace(members=members, models=models, lease_held=True),
            renderer=SimpleNamespace(serves=lambda model: True),
            settings=CarrierSettings(**settings),
        )

    async def _ensure_consumer(self, spec: object) -> None:
        return None

    def _on_change(self, callback: Callable[[], None]) -> None:
        self.changed = callback


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_credit_follows_the_slots() -> None:
    there = Deployment()
    async with TaskScope() as tasks:
        intake = JobIntake(there.deps(), HeldJobs(), tasks, lambda slug, delivery: None)
        intake.start()
        await turns()
        assert there.pull_loop.credit == CREDIT
        there.slots = 2 * SLOTS
        there.changed()
        await turns()
        assert there.pull_loop.credit == 2 * CREDIT
        intake.stop()
        await turns()
        assert there.pull_loop.credit == 0
        there.pull_loop.over.set()


async def test_a_pause_ends_although_its_timer_is_early(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    due: list[Callable[[], None]] = []

    def call(when: float, callback: Callable[[], None], *args: Any) -> asyncio.Handle:
        due.append(callback)
        return loop.call_soon(lambda: None)

    there = Deployment()
    async with TaskScope() as tasks:
        intake = JobIntake(there.deps(retry_s=60.0), HeldJobs(), tasks, lambda slug, delivery: None)
        intake.start()
        await turns()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_at", call)
            patch.setattr(loop, "call_later", call)
            intake.pause()
            intake.pause()
        await turns()
        assert there.pull_loop.credit == 0
        due[-1]()
        await turns()
        assert there.pull_loop.credit == CREDIT
        there.pull_loop.over.set()


CLASSES = ("hi", "std", "batch")


@given(
    st.lists(st.tuples(st.sampled_from(CLASSES), st.sampled_from("abc"), st.sampled_from([1.0, 2.0, 3.0])), max_size=12),
    st.data(),
)
def test_the_order_is_that_of_a_search_through_all_of_them(wishes: list[tuple[str, str, float]], data: st.DataObject) -> None:
    """Jobs are removed in between; a share grows with each start."""
    waiting, left, started = WaitingJobs(), dict[int, HeldJob](), Counter[str]()
    for seq, (request_class, tenant, deadline) in enumerate(wishes):
        left[seq] = held(seq, tenant=tenant, request_class=request_class, deadline=deadline)
        waiting.add(left[seq])
    while left:
        if data.draw(st.booleans()):
            gone = left.pop(data.draw(st.sampled_from(sorted(left))))
            waiting.remove(gone)
            waiting.remove(gone)
            continue
        expected = min(left.values(), key=lambda h: (RANKS[h.job.request_class], started[h.job.tenant], h.job.deadline, h.seq))
        assert waiting.take(started) is expected
        assert len(waiting) == len(left) - 1
        del left[expected.seq]
        started[expected.job.tenant] += 1
    assert waiting.take(started) is None


def test_a_job_of_the_same_sequence_replaces_one_that_was_removed() -> None:
    waiting, before, other, after = WaitingJobs(), held(1), held(2), held(1)
    waiting.add(other)
    waiting.add(before)
    waiting.remove(before)
    waiting.add(after)
    assert waiting.take({}) is after
    assert waiting.take({}) is other
    assert waiting.take({}) is None


def waiting_of(*jobs: HeldJob) -> WaitingJobs:
    waiting = WaitingJobs()
    for job in jobs:
        waiting.add(job)
    return waiting


def test_jobs_start_by_class_then_share_then_deadline() -> None:
    late, soon = held(1, deadline=90.0), held(2, deadline=50.0)
    urgent, other = held(3, request_class="std", deadline=99.0), held(4, tenant="u", deadline=80.0)
    assert waiting_of(late, soon, urgent, other).take({}) is urgent
    assert waiting_of(late, soon, other).take({}) is soon
    assert waiting_of(late, soon, other).take({"t": 1}) is other
    assert waiting_of().take({}) is None
