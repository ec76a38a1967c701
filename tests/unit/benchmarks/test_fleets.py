"""The benchmark of one fleet against two."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fleet_kinds import H100_8BIT, LARGE, Kind, kinds_of, make_kind
from benchmarks.fleets import Search, long_prompt, read_azure, with_targets
from headrace.tools.replay_bench.engine import EngineModel
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, SAMPLE, Trace, TraceRequest, read_trace

SLOW = Kind("slow", 1.0, EngineModel(blocks=2_000, prefill_rate=8_000.0, base_s=0.016))
QUICK = Kind("quick", 4.0, EngineModel(blocks=8_000, slots=256, prefill_rate=24_000.0, decode_s=0.000_03))


def search(kinds: tuple[Kind, ...] = (SLOW, QUICK)) -> Search:
    trace = with_targets(read_trace(SAMPLE, limit=80), strict=0.5, ttft_s=4.0, loose_s=10.0)
    return Search(trace, kinds, ttft_s=4.0, attain=0.9)


def test_a_trace_without_prefixes_shares_none_and_keeps_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.4799600,511,0"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    first, second = read_azure(path, None).requests
    assert (first.at_s, first.tokens, first.output, len(first.chain)) == (0.0, 4808, 10, 10)
    assert (round(second.at_s, 6), second.tokens, second.output, len(second.chain)) == (0.5, 511, 1, 1)
    assert not {*first.chain} & {*second.chain}


def test_every_request_has_one_of_two_targets() -> None:
    trace = with_targets(read_trace(SAMPLE, limit=80), strict=0.5, ttft_s=4.0, loose_s=10.0)
    assert {one.ttft_target_s for one in trace.requests} == {4.0, 10.0}


def test_targets_go_by_the_part_of_a_long_prompt_that_no_cache_has() -> None:
    first = TraceRequest(at_s=0.0, tokens=3 * BLOCK_TOKENS, output=1, chain=(1, 2, 3))
    again = TraceRequest(at_s=1.0, tokens=4 * BLOCK_TOKENS, output=1, chain=(1, 2, 3, 4))
    assert long_prompt(Trace("", (first,))) == 3 * BLOCK_TOKENS
    assert long_prompt(Trace("", (first, *[again] * 98))) < BLOCK_TOKENS


def test_the_least_good_number_is_found_and_one_worker_less_is_not_good() -> None:
    one = search()
    found = one.alone(1, 8)
    assert found is not None
    assert one.good(found)
    number = found.workers["quick"]
    assert number > 1
    assert not one.good(one.replay(0, number - 1))
    assert one.alone(1, number - 1) is None


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


def test_more_accelerators_are_quicker_and_each_of_them_does_less() -> None:
    kinds = [make_kind(str(count), LARGE, H100_8BIT, count) for count in (2, 4, 8)]
    rates = [kind.model.prefill_rate for kind in kinds]
    assert rates == sorted(rates)
    each = [kind.model.prefill_rate / kind.price for kind in kinds]
    assert each == sorted(each, reverse=True)
    assert each[2] / each[0] == pytest.approx(0.61, abs=0.02)


def test_a_small_accelerator_takes_no_long_requests() -> None:
    kinds = {kind.name: kind.model for kind in kinds_of("accelerators")}
    assert kinds["l4"].context < 50_000 < 400_000 < kinds["h100"].context
