"""What a run is reported as."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.tools.serve_bench.connection import Outcome
from headrace.tools.serve_bench.processes import Usage
from headrace.tools.serve_bench.report import CLIENT, latency, make_report, render


def test_percentiles_count_a_value_as_often_as_it_came() -> None:
    found = latency([(0.001, 98), (0.5, 1), (1.0, 1)])
    assert (found.p50, found.p90, found.p99, found.most) == (1.0, 1.0, 500.0, 1000.0)


def test_nothing_has_no_percentiles() -> None:
    assert latency([]).p99 is None
    assert "-" in render(make_report(Outcome(seconds=1.0), {}, {}, {}))


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1))
def test_percentiles_are_values_in_order(values: list[tuple[float, int]]) -> None:
    found = latency(values)
    assert found.p50 is not None
    assert found.p90 is not None
    assert found.p99 is not None
    assert found.most == max(value for value, _ in values) * 1e3
    assert found.p50 <= found.p90 <= found.p99 <= found.most
    spread = sorted(value * 1e3 for value, times in values for _ in range(times))
    assert found.p50 == spread[-(-len(spread) // 2) - 1]


def test_cpu_is_that_of_the_run_per_second_and_per_request() -> None:
    outcome = Outcome(seconds=2.0, ok=4, chunks=8)
    before = {CLIENT: Usage(1.0, 0), "router-1": Usage(5.0, 0), "gone": Usage(1.0, 0)}
    after = {CLIENT: Usage(1.2, 2**20), "router-1": Usage(6.0, 3 * 2**20)}
    report = make_report(outcome, before, after, {"loop": "closed"})
    assert (report.requests_per_s, report.tokens_per_s) == (2.0, 4.0)
    router = report.processes["router-1"]
    assert (router.cores, router.us_per_request, router.rss_mib) == (0.5, 250_000.0, 3.0)
    assert set(report.processes) == {CLIENT, "router-1"}
    assert "may be what was measured" not in render(report)


def test_a_client_that_is_busy_itself_is_told() -> None:
    report = make_report(Outcome(seconds=1.0, ok=1), {CLIENT: Usage(0.0, 0)}, {CLIENT: Usage(0.9, 0)}, {})
    assert "may be what was measured" in render(report)
