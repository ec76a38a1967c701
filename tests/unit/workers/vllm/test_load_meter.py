"""The load an engine reports is its scheduler's view, corrected where that is stale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.workers.engine import Load
from headrace.workers.vllm.load_meter import LoadMeter


def stats(
    running: int, waiting: int = 0, skipped: int = 0, usage: float = 0.0, prefill: int | None = None, decodes: int = 0
) -> Any:
    """`prefill`: prompt tokens of this step; None: vLLM was told not to give details."""
    details = None
    if prefill is not None:
        details = SimpleNamespace(num_ctx_tokens=prefill, num_generation_requests=decodes, elapsed_ms=3.0)
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=skipped,
        kv_cache_usage=usage,
        iteration_details=details,
    )


def test_it_repeats_what_the_scheduler_said() -> None:
    meter = LoadMeter()
    meter.note(stats(3, waiting=1, skipped=1, usage=0.25))
    load = meter.read(mine=5, blocks=100)
    assert (load.running, load.waiting, load.blocks_used, load.blocks_total) == (3, 2, 25, 100)


def test_an_empty_engine_is_idle_whatever_its_last_step_said() -> None:
    meter = LoadMeter()
    meter.note(stats(3, usage=0.25))
    assert meter.read(mine=0, blocks=100) == Load(blocks_total=100)


def test_blocks_on_offer_count_although_no_sequence_is_inside() -> None:
    meter = LoadMeter()
    meter.holds = True
    meter.note(stats(0, usage=0.25))
    assert meter.read(mine=0, blocks=100) == Load(blocks_used=25, blocks_total=100)
    meter.note(stats(0, usage=0.0))
    assert meter.read(mine=0, blocks=100) == Load(blocks_total=100)


def test_sequences_not_seen_by_a_step_yet_are_waiting() -> None:
    assert LoadMeter().read(mine=2, blocks=100).waiting == 2


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


def test_steps_whose_reports_come_together_have_taken_their_time() -> None:
    meter = LoadMeter()
    meter.note(stats(1, prefill=64))
    meter.note(stats(1, prefill=0, decodes=1))
    assert meter.step_s >= 0.003


def test_each_rank_has_its_own_load_and_all_are_added_up() -> None:
    meter = LoadMeter()
    meter.queued("a", 100)
    meter.note(stats(3, waiting=1, usage=0.5, prefill=64, decodes=2), 0)
    meter.note(stats(1, usage=0.25, prefill=0, decodes=1), 1)
    load = meter.read(mine=5, blocks=200, ranks=2)
    assert (load.running, load.waiting, load.blocks_used, load.step_decodes) == (4, 1, 75, 3)
    first, second = load.ranks
    assert (first.running, first.waiting, first.blocks_used, first.blocks_total) == (3, 1, 50, 100)
    assert (second.running, second.blocks_used, second.step_decodes) == (1, 25, 1)


def test_ranks_that_have_become_idle_say_so_each() -> None:
    meter = LoadMeter()
    meter.note(stats(3, usage=0.5), 0)
    meter.note(stats(1, usage=0.25), 1)
    idle = meter.read(mine=0, blocks=200, ranks=2)
    assert [(rank.running, rank.blocks_used, rank.blocks_total) for rank in idle.ranks] == [(0, 0, 100)] * 2


def test_one_rank_of_several_engines_counts_under_any_number() -> None:
    meter = LoadMeter()
    meter.note(stats(2, usage=0.5), 3)
    load = meter.read(mine=2, blocks=100)
    assert (load.running, load.blocks_used, load.ranks) == (2, 50, ())


def test_a_step_says_what_it_did() -> None:
    meter = LoadMeter()
    meter.note(stats(2, prefill=64, decodes=1))
    load = meter.read(mine=2, blocks=100)
    assert (load.step_prefill_tokens, load.step_decodes, load.step_s) == (64, 1, 0.003)


def test_what_is_still_to_be_prefilled_shrinks_with_every_step() -> None:
    meter = LoadMeter()
    meter.queued("a", 100)
    meter.queued("b", 50)
    assert meter.read(mine=2, blocks=9).queued_prefill_tokens == 150
    meter.note(stats(1, prefill=80))
    assert meter.read(mine=2, blocks=9).queued_prefill_tokens == 70
    meter.prefilled("a", 100)  # its first token comes before the word of the step that made it
    meter.note(stats(2, prefill=30))
    assert meter.read(mine=2, blocks=9).queued_prefill_tokens == 40
    meter.prefilled("b", 50)
    meter.note(stats(2, prefill=40))
    assert meter.read(mine=2, blocks=9).queued_prefill_tokens == 0


def test_a_prompt_that_is_aborted_or_better_cached_than_expected_leaves_no_debt() -> None:
    meter = LoadMeter()
    meter.queued("a", 100)
    meter.note(stats(1, prefill=60))
    meter.gone("a")
    meter.note(stats(0, prefill=0))
    meter.queued("b", 100)
    assert meter.read(mine=1, blocks=9).queued_prefill_tokens == 100
    meter.prefilled("b", 10)
    meter.note(stats(1, prefill=10))
    meter.gone("b")
    assert meter.read(mine=1, blocks=9).queued_prefill_tokens == 0


def test_a_first_token_that_is_seen_after_the_word_of_its_step_leaves_no_debt_either() -> None:
    meter = LoadMeter()
    meter.queued("a", 100)
    meter.note(stats(1, prefill=100))
    meter.prefilled("a", 100)
    meter.queued("b", 50)
    assert meter.read(mine=2, blocks=9).queued_prefill_tokens == 50
    meter.note(stats(2, prefill=20))
    assert meter.read(mine=2, blocks=9).queued_prefill_tokens == 30
    meter.queued("c", 10)
    meter.note(stats(2, prefill=30))
    meter.prefilled("b", 50)
    assert meter.read(mine=2, blocks=9).queued_prefill_tokens == 10
