"""Batch runs of a worker make way at once for an interactive one that needs their slot or blocks."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.broker.messages import LoadReport
from headrace.broker.protocol.preemption import Yielding
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.settings import SessionSettings
from headrace.broker.worker.preemption import LOOK_S, Preemption
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World as VirtualWorld
from tests.unit.broker.protocol.test_preemption import batch_run
from tests.unit.broker.worker.test_run_lifecycle import World
from tests.unit.broker.worker.test_state import state

SLOTS = 4


class Engine(World):
    """An engine with some KV blocks; `fixed` are the runs that no other worker could continue."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks_total = self.blocks_used = 0
        self.fixed: set[Run] = set()

    def load(self, report: LoadReport) -> LoadReport:
        return msgspec.structs.replace(report, blocks_total=self.blocks_total, blocks_used=self.blocks_used)

    def resumable(self, run: Run) -> bool:
        return run not in self.fixed


class Bench:
    """A worker with four slots and blocks of 16 tokens. `move_soon` is carried out as far as its first wait."""

    def __init__(self, *runs: Run) -> None:
        self.engine: Any = Engine()
        self.state = state(block_size=16)
        self.tasks = TaskScope()
        deps = WorkerDeps(messaging=self.engine, subjects=Subjects(), settings=SessionSettings())
        engine = self.engine
        lifecycle = RunLifecycle(deps, self.state, engine, engine, engine, engine, self.tasks)
        self.preemption = Preemption(deps, self.state, engine, lifecycle)
        for run in runs:
            self.state.runs.add(run)

    async def arrive(self, run: Run) -> list[str]:
        """Let a run come in. Returns the ids of the runs that were stopped for it at once."""
        async with self.tasks:
            self.state.runs.add(run)
            self.preemption.make_room(run)
            return [stopped.id for stopped in self.engine.stopped]


def interactive(seq: int, **values: Any) -> Run:
    return batch_run(seq, request_class="std", **values)


async def test_an_interactive_run_on_a_full_worker_gets_the_slot_of_a_batch_run() -> None:
    bench = Bench(*(batch_run(seq, made=seq) for seq in range(1, 5)))
    assert bench.preemption.slots == SLOTS
    assert await bench.arrive(interactive(9)) == ["q1"]
    assert bench.engine.moved == [(1, None, "preempted", 0)]
    assert bench.state.runs.sequences == SLOTS


async def test_a_free_slot_preempts_nothing() -> None:
    bench = Bench(*(batch_run(seq) for seq in range(1, 4)))
    assert await bench.arrive(interactive(9)) == []


async def test_a_slot_that_is_about_to_be_free_preempts_nothing() -> None:
    ended = batch_run(4, made=1)
    ended.end(0.0)
    bench = Bench(*(batch_run(seq) for seq in range(1, 4)), ended)
    assert await bench.arrive(interactive(9)) == []


async def test_interactive_runs_never_make_way() -> None:
    bench = Bench(*(interactive(seq) for seq in range(1, 5)))
    assert await bench.arrive(interactive(9)) == []
    assert bench.preemption.slots == 0


async def test_a_batch_run_that_finds_no_slot_goes_back_itself() -> None:
    bench = Bench(*(interactive(seq) for seq in range(1, 5)))
    arrived = Run(
        envelope=batch_run(9).envelope, attempt=1, history=[], run=9, delivery=batch_run(9).delivery
    )  # not started yet
    assert await bench.arrive(arrived) == []  # the engine never had it
    assert bench.engine.moved == [(9, None, "preempted", 0)]
    assert arrived.state is RunState.GONE


async def test_a_kept_batch_run_takes_its_slot_like_an_interactive_one() -> None:
    kept = batch_run(9)
    kept.kept = True
    bench = Bench(*(batch_run(seq, made=seq) for seq in range(1, 5)))
    assert await bench.arrive(kept) == ["q1"]


async def test_an_interactive_run_gets_the_blocks_that_it_needs() -> None:
    bench = Bench(batch_run(1, made=1), batch_run(2, made=2))  # 7 blocks each
    bench.engine.blocks_total, bench.engine.blocks_used = 100, 95
    assert await bench.arrive(interactive(3, tokens=64)) == []  # 4 blocks and one for the answer
    bench.engine.blocks_used = 99
    assert await bench.arrive(interactive(4, tokens=64)) == ["q1"]


async def test_a_batch_run_takes_no_blocks_from_another() -> None:
    bench = Bench(batch_run(1, made=1))
    bench.engine.blocks_total = bench.engine.blocks_used = 100
    assert await bench.arrive(batch_run(2)) == []


async def test_the_report_names_only_runs_that_can_really_leave() -> None:
    one, other = batch_run(1, made=5), batch_run(2, choices=2)
    bench = Bench(one, other, interactive(3))
    assert bench.preemption.yielding() == Yielding(runs=2, slots=3, blocks=7 + 14, found=[one, other])
    bench.engine.fixed.add(other)
    assert bench.preemption.yielding() == Yielding(runs=1, slots=1, blocks=7, found=[one])
    bench.state.draining = True
    assert bench.preemption.yielding() == Yielding(found=[])


def preempted_within(seconds: float, bench: Bench) -> int:
    """Run the periodic look of this worker in virtual time; return how many runs it stopped."""

    async def process(_machine: Machine) -> None:
        async with bench.tasks:
            bench.tasks.spawn(bench.preemption.run())

    with VirtualWorld(1, CALM) as world:
        world.process("P", process)
        world.run(seconds)
    return len(bench.engine.stopped)


def test_while_interactive_runs_grow_batch_runs_leave_some_blocks_free() -> None:
    full = Bench(batch_run(1), batch_run(2), interactive(3))
    full.engine.blocks_total = full.engine.blocks_used = 640
    assert preempted_within(1.5 * LOOK_S, full) == 1
    roomy = Bench(batch_run(1), interactive(3))
    roomy.engine.blocks_total, roomy.engine.blocks_used = 640, 630
    assert preempted_within(1.5 * LOOK_S, roomy) == 0
    alone = Bench(batch_run(1), batch_run(2))
    alone.engine.blocks_total = alone.engine.blocks_used = 640
    assert preempted_within(1.5 * LOOK_S, alone) == 0
