"""The intake of a worker: who makes way for interactive work, how much work is asked for, and which rank a run gets."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import structlog

from headrace.broker.messages.requests import HEADER_RANK
from headrace.broker.protocol.preemption import Yielding
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.intake import LOOK_S, Intake, Preemption, choose_rank
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World as VirtualWorld
from tests.unit.broker.protocol.test_preemption import batch_run
from tests.unit.broker.protocol.test_protocol_runs import FakeDelivery, make
from tests.unit.broker.worker.bench import SLOTS, Bench


class Worker(Bench):
    """A worker with blocks of 16 tokens. `move_soon` is carried out as far as its first wait."""

    def __init__(self, *runs: Run) -> None:
        super().__init__(*runs, block_size=16)
        self.preemption = Preemption(self.deps, self.presence, self.runs)

    async def arrive(self, run: Run) -> list[str]:
        """Let a run come in. Returns the ids of the runs that were stopped for it at once."""
        async with self.tasks:
            self.runs.table.add(run)
            self.preemption.make_room(run)
            return [stopped.id for stopped in self.world.stopped]


def interactive(seq: int, **values: Any) -> Run:
    return batch_run(seq, request_class="std", **values)


async def test_an_interactive_run_on_a_full_worker_gets_the_slot_of_a_batch_run() -> None:
    bench = Worker(*(batch_run(seq, made=seq) for seq in range(1, 5)))
    assert bench.preemption.slots == SLOTS
    assert await bench.arrive(interactive(9)) == ["q1"]
    assert bench.world.moved == [(1, None, "preempted", 0)]
    assert bench.runs.table.sequences == SLOTS


async def test_interactive_runs_never_make_way() -> None:
    bench = Worker(*(interactive(seq) for seq in range(1, 5)))
    assert await bench.arrive(interactive(9)) == []
    assert bench.preemption.slots == 0


async def test_a_batch_run_that_finds_no_slot_goes_back_itself() -> None:
    bench = Worker(*(interactive(seq) for seq in range(1, 5)))
    arrived = Run(
        envelope=batch_run(9).envelope, attempt=1, history=[], run=9, delivery=batch_run(9).delivery
    )  # not started yet
    assert await bench.arrive(arrived) == []  # the engine never had it
    assert bench.world.moved == [(9, None, "preempted", 0)]
    assert arrived.state is RunState.GONE


async def test_an_interactive_run_gets_the_blocks_that_it_needs() -> None:
    bench = Worker(batch_run(1, made=1), batch_run(2, made=2))  # 7 blocks each
    bench.world.blocks_total, bench.world.blocks_used = 100, 95
    assert await bench.arrive(interactive(3, tokens=64)) == []  # 4 blocks and one for the answer
    bench.world.blocks_used = 99
    assert await bench.arrive(interactive(4, tokens=64)) == ["q1"]


async def test_the_report_names_only_runs_that_can_really_leave() -> None:
    one, other = batch_run(1, made=5), batch_run(2, choices=2)
    bench = Worker(one, other, interactive(3))
    assert bench.preemption.yielding() == Yielding(runs=2, slots=3, blocks=7 + 14, found=[one, other])
    bench.world.fixed.add(other)
    assert bench.preemption.yielding() == Yielding(runs=1, slots=1, blocks=7, found=[one])
    bench.presence.leave()
    assert bench.preemption.yielding().runs == 0


def preempted_within(seconds: float, *runs: Run, blocks_total: int = 640, blocks_used: int = 640) -> int:
    """Let a worker look at its blocks in virtual time; return how many runs it stopped."""
    stopped: list[Run] = []

    async def process(_machine: Machine) -> None:
        bench = Worker(*runs)
        bench.world.blocks_total, bench.world.blocks_used, bench.world.stopped = blocks_total, blocks_used, stopped
        async with bench.tasks:
            bench.tasks.spawn(bench.preemption.run())

    with VirtualWorld(1, CALM) as world:
        world.process("P", process)
        world.run(seconds)
    return len(stopped)


def test_while_interactive_runs_grow_batch_runs_leave_some_blocks_free() -> None:
    assert preempted_within(1.5 * LOOK_S, batch_run(1), batch_run(2), interactive(3)) == 1
    assert preempted_within(1.5 * LOOK_S, batch_run(1), interactive(3), blocks_used=630) == 0
    assert preempted_within(1.5 * LOOK_S, batch_run(1), batch_run(2)) == 0


def intake(bench: Worker) -> Intake:
    messaging: Any = bench.world
    messaging.pull = lambda *_, **__: MagicMock(credit=0)
    messaging.ensure_consumer = MagicMock()
    bench.world.has_router = lambda pool: False
    admission: Any = None
    return Intake(bench.deps, bench.presence, bench.runs, admission, bench.preemption, bench.world)


async def test_runs_and_requests_on_their_way_take_slots() -> None:
    bench = Worker(make(1, choices=2))
    one = intake(bench)
    assert (bench.runs.free_slots, one._room("std")) == (2, 2)
    one._placed["a", 1] = 0.0
    assert (bench.runs.free_slots, one._room("std")) == (2, 1)
    bench.presence.changed()
    one._work.add_credit.assert_called_with(2)  # type: ignore[attr-defined]
    one._requests["std"].add_credit.assert_called_with(1)  # type: ignore[attr-defined]


async def test_a_message_that_is_delivered_again_only_replaces_the_ack_handle() -> None:
    bench = Worker(run := make(5))
    again = FakeDelivery(5, num_delivered=2)
    assert intake(bench)._take(again)
    assert ([*bench.runs.table], run.delivery) == ([run], again)


async def test_another_message_under_the_sequence_of_a_held_one_takes_its_place() -> None:
    """A stream that was deleted and made again counts from 1."""
    bench = Worker(run := make(5))
    bench.presence.withdraw("pause")  # the new message is given back
    other = FakeDelivery(5, data=b"another")
    assert not intake(bench)._take(other)
    assert (run.gone, run.delivery is not other, len(bench.runs.table)) == (True, True, 0)


def runs(*ranks: int) -> list[Run]:
    made = [make(n + 1, request_id=f"r{n}") for n in range(len(ranks))]
    for run, rank in zip(made, ranks, strict=True):
        run.rank = rank
    return made


def test_the_rank_that_a_router_names_is_taken() -> None:
    assert choose_rank({HEADER_RANK: "1"}, runs(1, 1, 1), ranks=2) == 1


@pytest.mark.parametrize("named", ["2", "-1", "x", "1.0", "99999999999"])
def test_a_rank_that_the_engine_does_not_have_is_reported_and_another_is_taken(named: str) -> None:
    with structlog.testing.capture_logs() as logs:
        assert choose_rank({HEADER_RANK: named}, runs(0), ranks=2) == 1
    assert [entry["event"] for entry in logs] == ["work.unknown_rank"]
