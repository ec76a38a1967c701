"""A worker is emptied in order: what waits goes at once, what runs has its grace period, and nothing is moved twice."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.broker.messages import WorkerMember
from headrace.broker.protocol.run import RunState
from headrace.broker.worker.operating.evacuation import Evacuation
from headrace.broker.worker.state import WorkerState
from tests.unit.broker.protocol.test_runs import make


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
