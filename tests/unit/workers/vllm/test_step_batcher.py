"""All outputs of one engine step reach the sink in one call."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.broker.messages import Sampling
from headrace.workers.engine import Fault, Output, Sequence
from headrace.workers.vllm.step_batcher import DeltaHandlers, EngineRequest, StepBatcher


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
