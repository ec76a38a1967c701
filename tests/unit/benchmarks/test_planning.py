"""The comparison of planners: its traffic, the published rules, the clairvoyant, and that the planner misses less."""

from __future__ import annotations

import pytest

from benchmarks.planning.__main__ import SLOW, Arena
from benchmarks.planning.clairvoyant import Clairvoyant
from benchmarks.planning.dynamo_rules import PublishedRules
from benchmarks.planning.traffic import waves
from headrace.planner.capacity import Speed, Targets
from headrace.planner.replay import Request
from tests.support.planner_sights import seen, worker

LOOSE = Targets(ttft_s=12.0, itl_s=1.2)


def rules(**kw: int) -> PublishedRules:
    return PublishedRules(speed=Speed(), ttft_s=1.0, itl_s=0.1, most=20, predictor="constant", **kw)


def test_the_clairvoyant_starts_so_that_the_burst_finds_its_workers() -> None:
    burst = [Request(at=300.0 + i / 20, prompt=1000, uncached=1000, output=10) for i in range(1200)]
    requests = [Request(at=10.0 * i, prompt=1000, uncached=1000, output=10) for i in range(30)] + burst
    some = Clairvoyant(requests, speed=Speed(), targets=Targets(ttft_s=1.0, itl_s=0.1), start_s=60.0)
    begun = [tick for tick in range(100) if some.decide(seen(5.0 * tick, worker("w0")))]
    assert begun
    assert 300 - 60 - 5 - 15 <= 5.0 * begun[0] <= 300 - 60


@pytest.mark.slow
def test_the_planner_misses_less_than_half_of_what_the_published_rules_miss_and_never_turns_back() -> None:
    requests = waves(1.0, period_s=1800.0, peak=5.0)
    arena = Arena(requests, speed=SLOW, start_s=60.0, targets=LOOSE, most=20)
    planner = arena.play("planner", arena.planner(), first=2)
    published = [arena.play(name, arena.published(name), first=2) for name in ("kalman", "constant")]  # type: ignore[arg-type]
    assert planner["failed"] == 0
    assert planner["turns"] == 0
    assert all(2 * int(str(planner["missed"])) <= int(str(one["missed"])) for one in published)
