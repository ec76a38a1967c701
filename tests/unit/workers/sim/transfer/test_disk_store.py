"""Sequences wait for the real bytes of the disk tier, and compute what does not come back."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from headrace.workers.engine import Output
from headrace.workers.errors import EngineStartFailed
from headrace.workers.sim.answers.tokens import bundled_vocabulary, expected_ids
from headrace.workers.sim.scheduling.scheduler import Scheduler, block_manager
from headrace.workers.sim.settings import SimSettings, parse_settings
from tests.support.sim_world import NO_FAULTS, sequence

SIZE = 4


class FakeReading:
    def __init__(self, values: list[int]) -> None:
        self.values = values
        self.broken: set[int] = set()
        self.done = False
        self.given_up = False


class FakeDisk:
    """Remembers what it was told; readings end when the test says so."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.readings: list[FakeReading] = []

    def put(self, value: int, cell: int) -> None:
        self.held[value] = cell

    def drop(self, value: int) -> None:
        del self.held[value]

    def clear(self) -> None:
        self.held.clear()

    def read(self, values: Iterable[int]) -> FakeReading:
        reading = FakeReading(list(values))
        assert set(reading.values) <= self.held.keys()
        self.readings.append(reading)
        return reading

    def give_up(self, reading: FakeReading) -> None:
        reading.given_up = True

    def poll(self) -> bool:
        return False

    def poll_at(self) -> float | None:
        return None


class Bench:
    def __init__(self) -> None:
        settings = SimSettings(block_size=SIZE, blocks=8, disk_blocks=16, context_length=32)
        self.manager = block_manager(settings)
        self.disk = FakeDisk()
        assert self.manager.lower is not None
        self.manager.lower.disk_store = self.disk
        self.scheduler = Scheduler(settings, bundled_vocabulary(), manager=self.manager, disk=self.disk)
        self.outputs: dict[str, list[Output]] = {}

    def run(self, name: str, prompt: list[int]) -> None:
        self.scheduler.submit(sequence(name, prompt, max_tokens=3), NO_FAULTS)
        self.step()

    def step(self) -> None:
        while (result := self.scheduler.step()) is not None:
            self.manager.check()
            for output in result.outputs:
                self.outputs.setdefault(output.id, []).append(output)

    def ids(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, []) for token in output.ids]


PROMPT = list(range(17, 17 + 4 * SIZE + 1))


@pytest.fixture
def bench() -> Bench:
    """With the four blocks of the prompt on disk."""
    bench = Bench()
    bench.run("a", PROMPT)
    bench.run("b", [5] * 28)  # takes all eight blocks
    assert bench.manager.lower is not None
    assert bench.manager.lower.counts()["disk"] == len(bench.disk.held) >= 4
    return bench


def test_a_sequence_waits_for_its_bytes(bench):
    bench.run("c", PROMPT)
    (reading,) = bench.disk.readings
    assert len(reading.values) == 4
    assert bench.ids("c") == []
    assert bench.scheduler.next_at() is None  # nothing to do until the disk says something
    reading.done = True
    bench.step()
    assert bench.ids("c") == expected_ids(PROMPT, 3)
    assert bench.outputs["c"][0].cached_tokens == 4 * SIZE
    assert not set(reading.values) & bench.disk.held.keys()  # they are on the device now


@pytest.mark.parametrize("broken", [0, 2])
def test_from_the_first_broken_block_on_it_is_computed_and_forgotten_on_disk(bench, broken):
    bench.run("c", PROMPT)
    (reading,) = bench.disk.readings
    reading.broken.add(reading.values[broken])
    reading.done = True
    bench.step()
    assert bench.ids("c") == expected_ids(PROMPT, 3)
    assert bench.outputs["c"][0].cached_tokens == broken * SIZE
    assert reading.values[broken] not in bench.disk.held
    assert set(reading.values[broken + 1 :]) <= bench.disk.held.keys()  # nothing is wrong with those


def test_who_leaves_gives_up_reading(bench):
    bench.run("c", PROMPT)
    bench.scheduler.abort(["c"])
    (reading,) = bench.disk.readings
    assert reading.given_up
    assert set(reading.values) <= bench.disk.held.keys()
    assert bench.manager.used == 0


def test_a_reset_forgets_what_is_on_disk(bench):
    bench.manager.clear()
    assert bench.disk.held == {}


def test_a_path_without_anything_to_keep_there_is_refused():
    for args in ({"disk_path": "x"}, {"disk_path": "x", "disk_blocks": 5, "kv_block_bytes": 0}):
        with pytest.raises(EngineStartFailed, match="disk_path"):
            parse_settings(args)
