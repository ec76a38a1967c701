"""What a dead engine leaves behind: the jobs that were in it are evidence, or those alone that it names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.broker.messages.members import WorkerMember
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.settings import SessionSettings
from headrace.broker.worker.drain import Drainer, Evacuation
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.protocol.test_protocol_runs import make


class World:
    """The server, the lease, the engine and the mover."""

    def __init__(self) -> None:
        self.moved: dict[str, tuple[str | None, int]] = {}

    def bucket(self, name: str) -> World:
        return self

    async def put(self, key: str, value: bytes) -> None: ...

    async def update(self, value: bytes) -> None: ...

    async def move(self, run: Run, *, suspect: str | None, reason: str, group: int = 0) -> None:
        self.moved[run.id] = suspect, group

    async def move_all(self, worker: str, **_why: Any) -> int:
        return 0


ENGINE = ("w1#engine", 3)
NOT = (None, 0)


@pytest.mark.parametrize(
    ("named", "moved"),
    [
        ((), {"a": ENGINE, "b": ENGINE, "c": ENGINE, "waits": NOT}),
        (("b",), {"a": NOT, "b": ("w1#named", 1), "c": NOT, "waits": NOT}),
        (("b", "c", "waits"), {"a": NOT, "b": ("w1#named", 2), "c": ("w1#named", 2), "waits": NOT}),
        (("elsewhere",), {"a": ENGINE, "b": ENGINE, "c": ENGINE, "waits": NOT}),
    ],
)
async def test_the_death_of_an_engine_is_written_down_for_what_was_in_it_or_for_what_it_names(
    named: tuple[str, ...], moved: dict[str, tuple[str | None, int]]
) -> None:
    world: Any = World()
    state = WorkerState(WorkerMember(worker="w1", pool="p", model="m", slots=8), slots=8, tombstone_s=1.0)
    for seq, name in enumerate(("a", "b", "c", "waits")):
        run = make(seq, request_id=name)
        run.begin([], [])
        run.state = RunState.WAITING if name == "waits" else RunState.RUNNING
        state.runs.add(run)

    async def stop_taking() -> None: ...

    deps = WorkerDeps(messaging=world, subjects=Subjects(), settings=SessionSettings())
    drainer = Drainer(deps, state, world, world, world, None, stop_taking=stop_taking)
    await drainer.engine_died("out of memory", named)
    assert world.moved == moved
    assert drainer.done.is_set()


class Recorder:
    """The mover, the runs and the prefill server of a worker. Keeps what they are told."""

    def __init__(self) -> None:
        self.moved: list[str] = []
        self.kept: set[int] = set()
        self.left_s: list[float] = []

    async def move(self, run: Any, *, suspect: str | None, reason: str) -> None:
        self.moved.append(run.id)

    async def move_all(self, worker: str, *, died: bool, reason: str, keep: set[int]) -> int:
        self.kept = keep
        return 0

    async def leave(self, grace_s: float) -> None:
        self.left_s.append(grace_s)


def state_of(**runs: RunState) -> WorkerState:
    state = WorkerState(WorkerMember(worker="w1", pool="p", model="m", slots=8), slots=8, tombstone_s=1.0)
    for seq, (name, run_state) in enumerate(runs.items()):
        run = make(seq, request_id=name)
        run.begin([], [])
        run.state = run_state
        state.runs.add(run)
    return state


def evacuation(state: WorkerState, recorder: Any, *, prefills: bool = True) -> Evacuation:
    return Evacuation(state, recorder, recorder, recorder if prefills else None)


async def test_runs_that_only_wait_are_moved_at_once_and_held_messages_stay() -> None:
    recorder = Recorder()
    state = state_of(runs=RunState.RUNNING, waits=RunState.WAITING)
    await evacuation(state, recorder).move_unstarted("drain")
    assert recorder.moved == ["waits"]
    assert recorder.kept == {0, 1}, "the recorded move takes no run off the worker"


async def test_the_wait_ends_at_the_deadline_or_when_nothing_runs() -> None:
    now = asyncio.get_running_loop().time
    began = now()
    await evacuation(state_of(), Recorder()).wait(began + 60)
    assert now() - began < 5
    await evacuation(state_of(runs=RunState.RUNNING), Recorder()).wait(began + 0.1)
    assert now() >= began + 0.1


async def test_prefills_get_what_is_left_and_a_worker_without_any_has_none_to_leave() -> None:
    recorder = Recorder()
    await evacuation(state_of(), recorder).leave_prefills(1.5)
    await evacuation(state_of(), recorder, prefills=False).leave_prefills(9.0)
    assert recorder.left_s == [1.5]
