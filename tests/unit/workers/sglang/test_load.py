from __future__ import annotations

from dataclasses import dataclass

from headrace.workers.engine import Load
from headrace.workers.sglang.host import LoadMeter


@dataclass
class Snapshot:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    num_waiting_uncached_tokens: int = 0
    total_prefill_uncached_tokens: int = 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_busy_engine_reports_its_steps_and_its_queue() -> None:
    clock = Clock()
    meter = LoadMeter(page_size=16, blocks=10, clock=clock)
    meter.stepped([Snapshot(1, 2, 33, 70, 100)], decodes=1, mine=3)
    clock.now = 0.25
    load = meter.stepped([Snapshot(2, 1, 33, 40, 140)], decodes=2, mine=3)
    assert load == Load(
        running=2,
        waiting=1,
        blocks_used=3,
        blocks_total=10,
        queued_prefill_tokens=40,
        step_s=0.25,
        step_prefill_tokens=40,
        step_decodes=2,
    )
    assert meter.read([Snapshot(2, 1, 33, 40, 140)], mine=3) == load


def test_ranks_are_added_up() -> None:
    load = LoadMeter(page_size=16, blocks=10).read([Snapshot(1, 1, 16), Snapshot(2, 0, 17)], mine=4)
    assert (load.running, load.waiting, load.blocks_used) == (3, 1, 3)


def test_each_rank_has_its_own_load() -> None:
    meter = LoadMeter(page_size=16, blocks=20)
    load = meter.stepped([Snapshot(1, 1, 16, 40), Snapshot(2, 0, 17, 0, 64)], decodes=4, mine=4)
    first, second = load.ranks
    assert (first.running, first.waiting, first.blocks_used, first.queued_prefill_tokens) == (1, 1, 1, 40)
    assert (second.running, second.waiting, second.blocks_used, second.blocks_total) == (2, 0, 2, 10)
    assert (first.step_prefill_tokens, second.step_decodes) == (32, 2)


def test_sequences_that_no_snapshot_knows_yet_are_waiting() -> None:
    load = LoadMeter(page_size=16, blocks=10).read([Snapshot(1)], mine=4)
    assert (load.running, load.waiting) == (1, 3)


def test_an_engine_without_sequences_is_idle_whatever_its_last_snapshot_says() -> None:
    meter = LoadMeter(page_size=16, blocks=10)
    meter.stepped([Snapshot(1, 0, 16)], decodes=1, mine=1)
    assert meter.read([Snapshot(1, 0, 16)], mine=0) == Load(blocks_total=10)
    assert meter.stepped([Snapshot(1, 0, 16)], decodes=1, mine=1).step_s == 0.0, "the pause is no step"
