"""A plain job of one request takes its rows as they come, and ends as its request or its carrier says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.codec import decode
from headrace.broker.durable.held_job import HeldJob
from headrace.broker.durable.job_run import JobRunner
from headrace.broker.ingress.stream import JobStream, RowDispatcher
from headrace.broker.jobs import Job
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.durable import StreamEntry
from headrace.broker.messages.frames import Finish, JobFault, Row
from tests.support.ingress_parts import StreamReports
from tests.unit.broker.durable.carrier.test_crash_writer import CRASH, SUBJECT, Deps, plain_job
from tests.unit.broker.durable.fakes import FakeStreams
from tests.unit.broker.ingress.test_worker_wait import job as request


class Rendered:
    """Keeps the rows that it takes."""

    open = True

    def __init__(self) -> None:
        self.requests: Sequence[Job] = [request()]
        self.offsets: list[int] = []
        self.fault: JobFault | None = None

    def take(self, rows: list[Row]) -> list[bytes]:
        self.offsets += [row.offset for row in rows]
        return []

    async def finish(self) -> list[bytes]:
        return []

    def fail(self, fault: JobFault) -> list[bytes]:
        self.fault = fault
        return []


class Play:
    """One job that was submitted; `stream` is that of its request."""

    def __init__(self) -> None:
        self.streams = FakeStreams()
        self.held: HeldJob = plain_job(self.streams)
        self.rendered = Rendered()
        self.stream = JobStream("r", limit=9, owner=StreamReports(), dispatcher=RowDispatcher(asyncio.get_running_loop()))
        self.recorder: Any = None
        self.ended: list[str] = []
        deps: Any = Deps(self.streams)
        deps.ingress = SimpleNamespace(submit=self._submit)
        deps.wall = lambda: 1.0
        deps.notices = SimpleNamespace(step=lambda *_: None)
        deps.renderer = SimpleNamespace(render=self._render)
        ender: Any = SimpleNamespace(end=self._end)
        self.runner = JobRunner(deps, ender, lambda: None)
        self.task = asyncio.create_task(self.runner.run(self.held))

    async def _render(self, *_: Any) -> Rendered:
        return self.rendered

    async def _submit(self, _job: Job, *, recorder: Any, **_: Any) -> JobStream:
        self.recorder = recorder
        return self.stream

    async def _end(self, _held: HeldJob, status: str, **_: Any) -> bool:
        self.ended.append(status)
        return True

    async def submitted(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def over(self) -> list[str]:
        async with asyncio.timeout(5):
            assert await self.task
        return self.ended


def row(offset: int, *, last: bool = False) -> Row:
    fin = Finish(reason="stop") if last else None
    return Row(id="r", attempt=0, run=0, choice=0, offset=offset, ids=[offset], texts=["t"], fin=fin)


async def test_it_takes_all_rows_in_order_and_is_done() -> None:
    play = Play()
    await play.submitted()
    for offset in range(3):
        assert play.stream.take(row(offset, last=offset == 2), 0.0)
        await asyncio.sleep(0)
    play.stream.end(None)
    assert await play.over() == ["done"]
    assert play.rendered.offsets == [0, 1, 2]
    assert play.held.on_wake is None


async def test_rows_that_came_before_it_looked_are_taken() -> None:
    play = Play()
    play.stream.take(row(0), 0.0)
    play.stream.take(row(1, last=True), 0.0)
    play.stream.end(None)
    assert await play.over() == ["done"]
    assert play.rendered.offsets == [0, 1]


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_it_is_halted_while_it_waits_for_rows(how: Any) -> None:
    play = Play()
    await play.submitted()
    play.stream.take(row(0), 0.0)
    play.held.halt(how)
    assert await play.over() == [how]


async def test_a_fault_ends_it_after_the_rows_before() -> None:
    play = Play()
    await play.submitted()
    play.stream.take(row(0), 0.0)
    play.stream.end(JobFault("engine_error", "broken"))
    assert await play.over() == ["failed"]
    assert play.rendered.offsets == [0]
    assert play.rendered.fault is not None
    assert play.rendered.fault.message == "broken"


async def test_a_crash_is_written_while_it_waits_for_rows() -> None:
    play = Play()
    await play.submitted()
    assert not play.recorder.recorded([CRASH])
    async with asyncio.timeout(5):
        while not play.recorder.recorded([CRASH]):
            await asyncio.sleep(0)
    [stored] = play.streams.of(SUBJECT)
    assert decode(StreamEntry, stored.data).history == [HistoryEntry(1, "w", 0)]
    play.stream.take(row(0, last=True), 0.0)
    play.stream.end(None)
    assert await play.over() == ["done"]
    assert play.rendered.offsets == [0]
