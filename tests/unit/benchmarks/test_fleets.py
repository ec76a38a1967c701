"""The benchmark of one fleet against two."""

from __future__ import annotations

import pytest

from benchmarks.fleet_kinds import Kind
from benchmarks.fleets import Search, with_targets
from headrace.tools.replay_bench.engine import EngineModel
from headrace.tools.replay_bench.trace import SAMPLE, read_trace

SLOW = Kind("slow", 1.0, EngineModel(blocks=2_000, prefill_rate=8_000.0, base_s=0.016))
QUICK = Kind("quick", 4.0, EngineModel(blocks=8_000, slots=256, prefill_rate=24_000.0, decode_s=0.000_03))


def search(kinds: tuple[Kind, ...] = (SLOW, QUICK)) -> Search:
    trace = with_targets(read_trace(SAMPLE, limit=80), strict=0.5, ttft_s=4.0, loose_s=10.0)
    return Search(trace, kinds, ttft_s=4.0, attain=0.9)


def test_the_least_good_number_is_found_and_one_worker_less_is_not_good() -> None:
    one = search()
    found = one.alone(1, 8)
    assert found is not None
    assert one.good(found)
    number = found.workers["quick"]
    assert number > 1
    assert not one.good(one.replay(0, number - 1))
    assert one.alone(1, number - 1) is None


@pytest.mark.slow
def test_a_pair_is_good_uses_both_kinds_and_costs_less_than_it_had_to() -> None:
    one = search()
    alone = one.alone(1, 8)
    assert alone is not None
    found = one.pair(1, 0, 2 * alone.price)
    assert found is not None
    assert one.good(found)
    assert found.workers.keys() == found.share.keys() == {"slow", "quick"}
    assert found.price == found.workers["slow"] + 4.0 * found.workers["quick"] < 2 * alone.price
    assert found.told()["worker_hours"] == found.price * found.seconds / 3600.0
    assert one.pair(1, 0, 5.0) is None, "the cheapest pair costs that"


def test_a_kind_that_cannot_take_all_requests_is_no_pool() -> None:
    short = Kind("short", 0.1, EngineModel(blocks=2_000, context=1000, prefill_rate=1e6))
    one = search((short, QUICK))
    assert one.alone(0, 8) is None
    assert one.replay(8, 0).refused > 0
    both = one.replay(1, 8)
    assert both.refused == 0
    assert 0.0 < both.share["quick"] < 1.0
