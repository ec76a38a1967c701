"""The comparison of planners: its traffic, the published rules, the clairvoyant, and that the planner misses less."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.planning.__main__ import SLOW, Arena, turns
from benchmarks.planning.clairvoyant import Clairvoyant
from benchmarks.planning.dynamo_rules import PublishedRules
from benchmarks.planning.traffic import rates, read, stretched, waves
from headrace.planner.capacity import Speed, Targets
from headrace.planner.observe import RequestSight
from headrace.planner.replay import Request
from tests.support.planner_sights import seen, worker

LOOSE = Targets(ttft_s=12.0, itl_s=1.2)
PLACED = tuple(RequestSight(prompt=1000, uncached=1000) for _ in range(10))


def rules(**kw: int) -> PublishedRules:
    return PublishedRules(speed=Speed(), ttft_s=1.0, itl_s=0.1, most=20, predictor="constant", **kw)


def throughput(some: PublishedRules, *, arrived: int, workers: int = 1) -> int:
    """Run to the first throughput step and return what it changes."""
    there = [worker(f"w{n}") for n in range(workers)]
    for tick in range(36):
        assert some.decide(seen(5.0 * tick, *there, arrived=arrived, placed=PLACED, outputs=(50,))) == []
    return sum(1 if one.kind == "start" else -1 for one in some.decide(seen(180.0, *there, arrived=arrived)))


def test_a_stretched_trace_has_its_rates_for_longer(tmp_path: Path) -> None:
    lines = [f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.0000000,100,{10 + i % 7}" for i in range(600)]
    (tmp_path / "t.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    trace = read(tmp_path / "t.csv")
    found = stretched(trace, minutes=(0.0, 5.0), factor=12, moved_s=2.0)
    assert len(found) == 300 * 12
    assert 3550 < found[-1].at < 3650
    middle = rates(found, 60.0)[5:50]
    assert 0.8 < min(middle) <= max(middle) < 1.2
    moved = stretched(trace, minutes=(0.0, 5.0), factor=12, moved_s=20.0)
    assert max(rates(moved, 10.0)) < 3.0, "what is moved to before the beginning does not come all at once"
    later = stretched(trace, minutes=(5.0, 8.0), factor=2, moved_s=0.0)
    assert [one.output for one in later[::2]] == [one.output for one in trace[300:480]], "no request of the part before"


def test_of_a_trace_with_prefixes_only_what_no_earlier_prompt_began_with_is_to_be_computed(tmp_path: Path) -> None:
    blocks = [[1, 2, 3], [1, 2, 9], [7, 2], [1, 2, 3]]
    lines = [
        json.dumps({"timestamp": 1000 * n, "input_length": 512 * len(ids) - 12, "output_length": 5, "hash_ids": ids})
        for n, ids in enumerate(blocks)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    found = read(tmp_path / "t.jsonl")
    assert [one.at for one in found] == [0.0, 1.0, 2.0, 3.0]
    assert [(one.prompt, one.uncached) for one in found] == [(1524, 1524), (1524, 500), (1012, 1012), (1524, 1)]


def test_a_turn_is_up_down_and_up_within_the_time() -> None:
    changes = [(0.0, 1), (50.0, -1), (90.0, 1), (100.0, 1), (300.0, -1), (301.0, 1)]
    assert turns(changes, within_s=100.0) == 1
    assert turns(changes, within_s=80.0) == 0


def test_the_published_rules_plan_every_180_s_for_the_mean_rate_and_by_eight_at_most() -> None:
    assert throughput(rules(), arrived=1) == 0
    assert 1 <= throughput(rules(), arrived=100) <= 7
    assert throughput(rules(), arrived=10_000) == 8


def test_the_published_load_step_adds_one_only_if_every_engine_is_late_and_waits_for_it() -> None:
    some = rules()
    throughput(some, arrived=1)
    late, idle = worker("w0", queued_prefill_tokens=20_000), worker("w1")
    assert some.decide(seen(185.0, worker("w0"))) == []
    assert [one.kind for one in some.decide(seen(190.0, late))] == ["start"]
    assert some.decide(seen(195.0, late)) == [], "scaling is in progress"
    assert some.decide(seen(200.0, late, worker("w1", running=60, queued_prefill_tokens=8_000))) == [], "not every one is late"
    assert [one.kind for one in some.decide(seen(205.0, worker("w0"), idle))] == ["drain"]


def test_the_clairvoyant_starts_so_that_the_burst_finds_its_workers() -> None:
    burst = [Request(at=300.0 + i / 20, prompt=1000, uncached=1000, output=10) for i in range(1200)]
    requests = [Request(at=10.0 * i, prompt=1000, uncached=1000, output=10) for i in range(30)] + burst
    some = Clairvoyant(requests, speed=Speed(), targets=Targets(ttft_s=1.0, itl_s=0.1), start_s=60.0)
    begun = [tick for tick in range(100) if some.decide(seen(5.0 * tick, worker("w0")))]
    assert begun
    assert 300 - 60 - 5 - 15 <= 5.0 * begun[0] <= 300 - 60


def test_the_planner_misses_less_than_half_of_what_the_published_rules_miss_and_never_turns_back() -> None:
    requests = waves(1.0, period_s=1800.0, peak=5.0)
    arena = Arena(requests, speed=SLOW, start_s=60.0, targets=LOOSE, most=20)
    planner = arena.play("planner", arena.planner(), first=2)
    published = [arena.play(name, arena.published(name), first=2) for name in ("kalman", "constant")]  # type: ignore[arg-type]
    assert planner["failed"] == 0
    assert planner["turns"] == 0
    assert all(2 * int(str(planner["missed"])) <= int(str(one["missed"])) for one in published)
