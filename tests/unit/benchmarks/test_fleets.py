"""The benchmark of one fleet against two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.fleets import Search, read_azure, with_targets
from headrace.tools.replay_bench.trace import SAMPLE, read_trace


def test_a_trace_without_prefixes_shares_none_and_keeps_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.4799600,511,0"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    first, second = read_azure(path, None).requests
    assert (first.at_s, first.tokens, first.output, len(first.chain)) == (0.0, 4808, 10, 10)
    assert (round(second.at_s, 6), second.tokens, second.output, len(second.chain)) == (0.5, 511, 1, 1)
    assert not {*first.chain} & {*second.chain}


def test_the_least_good_number_is_found_and_one_worker_less_is_not_good() -> None:
    trace = with_targets(read_trace(SAMPLE, limit=80), strict=0.5, ttft_s=4.0, loose_s=10.0)
    assert {one.ttft_target_s for one in trace.requests} == {4.0, 10.0}
    search = Search(trace, ttft_s=4.0, attain=0.9)
    found = search.least(lambda n: (0, n), 8)
    assert found is not None
    assert search.good(found)
    assert found.wide > 1
    assert not search.good(search.replay(0, found.wide - 1))
    assert search.least(lambda n: (0, n), found.wide - 1) is None


def test_both_fleets_are_used_and_their_price_is_that_of_their_workers() -> None:
    trace = with_targets(read_trace(SAMPLE, limit=80), strict=0.5, ttft_s=4.0, loose_s=10.0)
    found = Search(trace, ttft_s=4.0, attain=0.9).replay(4, 2)
    assert 0.0 < found.in_single < 1.0
    told = found.told()
    assert told["price"] == 12.0
    assert told["worker_hours"] == 12.0 * dataclasses.asdict(found)["seconds"] / 3600.0
