import pytest

from benchmarks.client import Outcome, Workload
from benchmarks.engines.engine_pair import NAME, row, workload

WORKLOAD = Workload(streams=2, requests=10, tokens=8)


def outcome(seconds: float, first_token_s: float) -> Outcome:
    return Outcome(seconds=seconds, ok=10, first_token_s=[first_token_s] * 10)


def test_ratios_and_differences_are_of_one_round_each() -> None:
    pairs = [
        (outcome(2.0, 0.020), outcome(1.0, 0.015)),  # half as fast, 5 ms later
        (outcome(4.0, 0.030), outcome(4.0, 0.027)),
        (outcome(1.0, 0.012), outcome(2.0, 0.013)),
    ]
    found = row(WORKLOAD, pairs)
    assert found["tokens_per_s"] == 40.0
    assert found["own_tokens_per_s"] == 40.0
    assert found["ratio"] == [0.75, 1.0, 1.5]
    assert found["added_ttft_ms"] == [1.0, 3.0, 4.0]


def test_one_round_is_its_own_median() -> None:
    found = row(WORKLOAD, [(outcome(2.0, 0.020), outcome(1.0, 0.015))])
    assert found["ratio"] == pytest.approx([0.5, 0.5, 0.5])


def test_a_workload_is_read_as_streams_requests_and_tokens() -> None:
    assert workload("8x24x32") == Workload(streams=8, requests=24, tokens=32, model=NAME)
    with pytest.raises(ValueError, match="unpack"):
        workload("8x24")
