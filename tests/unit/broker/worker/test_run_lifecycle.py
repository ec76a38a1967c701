"""A run leaves the table, the engine and the stream together, whatever ends it, and once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.broker.messages.frames import JobFault
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.settings import SessionSettings
from headrace.broker.worker.runs import RunLifecycle
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.unit.broker.protocol.test_protocol_runs import FakeDelivery, make
from tests.unit.broker.worker.test_state import state

FAULT = JobFault("engine_busy", "try elsewhere", retriable=True)


class World:
    """The engine, the send path, the mover and the events."""

    def __init__(self) -> None:
        self.stored_again: list[int] = []
        self.started: list[Run] = []
        self.stopped: list[Run] = []
        self.failed: list[Run] = []
        self.moved: list[tuple[int, str | None, str, int]] = []
        self.events: list[str] = []

    def start(self, run: Run, payload: bytes) -> None:
        self.started.append(run)

    def stop(self, run: Run) -> None:
        self.stopped.append(run)

    def fail(self, run: Run, fault: JobFault) -> None:
        self.failed.append(run)

    append = append_token = flush = None

    async def move(
        self, *, seq: int, headers: Mapping[str, str], suspect: str | None, reason: str, group: int = 0, **_of: Any
    ) -> None:
        self.moved.append((seq, suspect, reason, group))

    async def store_again(self, seq: int, _data: bytes, _headers: Any) -> None:
        self.stored_again.append(seq)

    def add(self, kind: str, *_others: Any, **_named: Any) -> None:
        self.events.append(kind)


class Bench:
    def __init__(self, *, attempt: int = 1) -> None:
        self.world: Any = World()
        self.state: WorkerState = state()
        self.tasks = TaskScope()
        self.changes: list[int] = []
        self.state.on_change(lambda: self.changes.append(self.state.free_slots))
        deps = WorkerDeps(messaging=self.world, subjects=Subjects(), settings=SessionSettings(max_attempts=3))
        world = self.world
        self.runs = RunLifecycle(deps, self.state, world, world, world, world, self.tasks)
        self.run = make(1, attempt=attempt)
        self.run.begin([], [])
        self.state.runs.add(self.run)

    @property
    def acked(self) -> int:
        delivery = self.run.delivery
        assert isinstance(delivery, FakeDelivery)
        return delivery.acked


def test_a_started_run_is_in_the_engine_and_told_of() -> None:
    bench = Bench()
    bench.runs.start(bench.run, b"payload")
    assert (bench.world.started, bench.run.state, bench.world.events) == ([bench.run], RunState.RUNNING, ["started"])


@pytest.mark.parametrize("started", [False, True])
def test_a_dropped_run_is_acked_and_its_slot_is_free(*, started: bool) -> None:
    bench = Bench()
    if started:
        bench.runs.start(bench.run, b"")
    bench.runs.drop(bench.run, how="done")
    bench.runs.drop(bench.run, how="done")
    assert (bench.acked, bench.run.gone, bench.changes) == (1, True, [4])
    assert bench.world.stopped == [bench.run] * started, "an engine is asked to stop only what it was given"
    assert bench.world.events == ["started"] * started + ["settled"]


async def test_a_moved_run_is_stopped_moved_and_not_acked() -> None:
    bench = Bench()
    bench.runs.start(bench.run, b"")
    await bench.runs.move(bench.run, suspect="w#engine", reason="engine_died", group=3)
    await bench.runs.move(bench.run, suspect=None, reason="again")
    bench.runs.drop(bench.run, how="late")
    assert bench.world.moved == [(1, "w#engine", "engine_died", 3)]
    assert (bench.acked, bench.run.gone, bench.world.stopped) == (0, True, [bench.run])


async def test_while_it_is_moved_nothing_else_ends_it() -> None:
    bench = Bench()
    bench.runs.start(bench.run, b"")
    moving = bench.runs.move(bench.run, suspect=None, reason="drain")
    bench.run.move()
    bench.runs.drop(bench.run, how="cancelled")
    await moving
    assert (bench.acked, bench.run.state, bench.world.moved) == (0, RunState.MOVING, [])


async def test_a_displaced_run_is_stopped_without_an_ack_and_its_message_stored_again() -> None:
    """Its judge may not know that the stream was cut short."""
    bench = Bench()
    async with bench.tasks:
        bench.runs.start(bench.run, b"")
        bench.runs.abandon(bench.run)
    assert (bench.acked, bench.run.gone, bench.world.stopped) == (0, True, [bench.run])
    assert bench.world.stored_again == [1]


@pytest.mark.parametrize(("attempt", "moved"), [(1, True), (2, True), (3, False), (1001, True), (1003, False)])
async def test_a_run_is_tried_elsewhere_until_its_generation_has_had_its_attempts(attempt: int, *, moved: bool) -> None:
    bench = Bench(attempt=attempt)
    async with bench.tasks:
        bench.runs.start(bench.run, b"")
        bench.runs.retry_elsewhere(bench.run, FAULT)
    assert bench.world.moved == ([(1, None, "engine_busy", 0)] if moved else [])
    assert bench.world.failed == ([] if moved else [bench.run])


async def test_a_first_token_changes_the_load_and_nothing_else() -> None:
    bench = Bench()
    loads: list[bool] = []
    bench.state.on_load_change(lambda: loads.append(True))
    bench.runs.start(bench.run, b"")
    bench.runs.prefilled(bench.run, 7)
    assert (bench.world.events, loads, bench.changes) == (["started", "prefilled"], [True], [])


async def test_a_request_for_a_worker_that_serves_none_is_moved_in_the_background() -> None:
    bench = Bench()
    async with bench.tasks:
        bench.runs.return_unserved(FakeDelivery(9))
        assert bench.world.moved == []
    assert bench.world.moved == [(9, None, "role", 0)]
