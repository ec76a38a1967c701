"""A carrier asks for the jobs that its pools can use, and for none during a pause, which always ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.durable.carrier.held_job import HeldJobs
from headrace.broker.durable.carrier.intake import JobIntake
from headrace.broker.settings import CarrierSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

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
