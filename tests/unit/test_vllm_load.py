"""The load an engine reports is its scheduler's view, corrected where that is stale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from workers.engine import Load
from workers.vllm.load import LoadMeter


def stats(running: int, waiting: int = 0, skipped: int = 0, usage: float = 0.0) -> Any:
    return SimpleNamespace(
        num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=skipped, kv_cache_usage=usage
    )


def test_it_repeats_what_the_scheduler_said() -> None:
    meter = LoadMeter()
    meter.note(stats(3, waiting=1, skipped=1, usage=0.25))
    load = meter.read(mine=5, blocks=100, queued_tokens=40)
    assert (load.running, load.waiting, load.blocks_used, load.blocks_total) == (3, 2, 25, 100)
    assert load.queued_prefill_tokens == 40


def test_an_empty_engine_is_idle_whatever_its_last_step_said() -> None:
    meter = LoadMeter()
    meter.note(stats(3, usage=0.25))
    assert meter.read(mine=0, blocks=100, queued_tokens=0) == Load(blocks_total=100)


def test_sequences_not_seen_by_a_step_yet_are_waiting() -> None:
    assert LoadMeter().read(mine=2, blocks=100, queued_tokens=9).waiting == 2


def test_the_step_time_is_measured_between_steps_of_a_busy_engine() -> None:
    meter = LoadMeter()
    meter.note(stats(1))
    meter.note(stats(1))
    busy = meter.step_s
    assert busy > 0
    meter.note(stats(0))
    idle_from = meter.step_s
    meter.note(stats(1))  # the pause before this step is no step time
    assert meter.step_s == idle_from
