"""The load an engine reports is its scheduler's view, corrected where that is stale."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Fault, Load, Output, Sequence
from headrace.workers.vllm import load_meter
from headrace.workers.vllm.load_meter import DeltaHandlers, EngineRequest, LoadMeter, StatsLog, StepBatcher, shows_metrics


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


def test_its_series_are_shown_unless_its_statistics_were_switched_off() -> None:
    assert shows_metrics({})
    assert shows_metrics({"disable_log_stats": False})
    assert not shows_metrics({"disable_log_stats": True})


async def test_its_log_lines_come_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_meter, "LOG_EVERY_S", 0.01)
    written: list[int] = []
    log = StatsLog(SimpleNamespace(logger_manager=SimpleNamespace(log=lambda: written.append(1))))
    await asyncio.sleep(0.1)
    assert len(written) > 1
    log.close()
    count = len(written)
    await asyncio.sleep(0.05)
    assert len(written) == count


class Collector:
    """What vLLM gives us per request, as far as we use it."""

    def __init__(self, early: Any = None) -> None:
        self.early = early

    def get_nowait(self) -> Any:
        if isinstance(self.early, Exception):
            raise self.early
        return self.early

    def put(self, item: Any) -> None:
        raise AssertionError("the collector was not attached")


class Bench:
    def __init__(self) -> None:
        self.calls: list[list[Output]] = []
        self.ended: list[str] = []
        self.batcher = StepBatcher(
            self.calls.append, DeltaHandlers(convert=self.convert, on_error=self.fail, on_end=self.ended.append)
        )

    def run(self, name: str, early: Any = None) -> tuple[EngineRequest, Collector]:
        run = EngineRequest(Sequence(id=name, token_ids=[1], prompt_tokens=1, sampling=Sampling(max_tokens=4)))
        collector = Collector(early)
        self.batcher.attach(collector, run)
        return run, collector

    def convert(self, run: EngineRequest, item: Any) -> Output:
        if item == "garbage":
            raise ValueError(item)
        cached = None if run.started else 0
        return Output(run.sequence.id, [item], finish="length" if item == 99 else None, cached_tokens=cached)

    def fail(self, run: EngineRequest, error: Exception) -> Output | None:
        return None if str(error) == "dead" else Output(run.sequence.id, [], fault=Fault("x", str(error), retriable=True))


async def test_a_step_is_one_call() -> None:
    bench = Bench()
    collectors = [bench.run(name)[1] for name in "abc"]
    for step in (1, 2):
        for collector in collectors:
            collector.put(step)
        await asyncio.sleep(0)
    assert [[output.id for output in call] for call in bench.calls] == [["a", "b", "c"]] * 2
    assert [output.cached_tokens for output in bench.calls[0]] == [0, 0, 0]
    assert [output.cached_tokens for output in bench.calls[1]] == [None, None, None]


async def test_a_delta_that_came_before_the_attachment_is_not_lost() -> None:
    bench = Bench()
    _, collector = bench.run("a", early=1)
    collector.put(2)
    await asyncio.sleep(0)
    assert [[output.ids for output in call] for call in bench.calls] == [[[1]], [[2]]]


async def test_the_last_output_ends_the_run_and_nothing_follows() -> None:
    bench = Bench()
    _, collector = bench.run("a")
    collector.put(99)
    collector.put(5)
    await asyncio.sleep(0)
    assert bench.ended == ["a"]
    assert [output.ids for output in bench.calls[0]] == [[99]]


async def test_an_exception_becomes_a_fault() -> None:
    bench = Bench()
    bench.run("a", early=RuntimeError("broken"))
    await asyncio.sleep(0)
    assert bench.calls[0][0].fault == Fault("x", "broken", retriable=True)
    assert bench.ended == ["a"]


async def test_an_unreadable_output_fails_its_own_request_only() -> None:
    bench = Bench()
    (_, bad), (_, good) = bench.run("a"), bench.run("b")
    bad.put("garbage")
    good.put(1)
    await asyncio.sleep(0)
    broken, fine = bench.calls[0]
    assert broken.fault is not None
    assert not broken.fault.retriable
    assert fine.ids == [1]
    assert bench.ended == ["a"]


async def test_the_death_of_the_engine_is_no_output() -> None:
    bench = Bench()
    _, collector = bench.run("a")
    collector.put(RuntimeError("dead"))
    await asyncio.sleep(0)
    assert bench.calls == []
    assert bench.ended == ["a"]


async def test_dropped_sequences_reach_the_sink_no_more() -> None:
    bench = Bench()
    kept, dropped = bench.run("a"), bench.run("b")
    for _, collector in (kept, dropped):
        collector.put(1)
    dropped[0].closed = True
    bench.batcher.drop(frozenset({"b"}))
    dropped[1].put(2)
    await asyncio.sleep(0)
    assert [[output.id for output in call] for call in bench.calls] == [["a"]]
