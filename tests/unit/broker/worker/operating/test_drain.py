"""What a dead engine leaves behind: the jobs that were in it are evidence, or those alone that it names."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.messages import WorkerMember
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.settings import SessionSettings
from headrace.broker.worker.operating.drain import Drainer
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.protocol.test_runs import make


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
