import pytest

from headrace.tools.replay_bench.ceiling import ceiling, lru_rate
from headrace.tools.replay_bench.trace import SAMPLE, Trace, TraceRequest, read_trace


def trace(*chains):
    return Trace("t", tuple(TraceRequest(at_s=n, tokens=512 * len(c), output=1, chain=tuple(c)) for n, c in enumerate(chains)))


def test_by_hand():
    found = ceiling(trace([1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 2, 4]), pooled_blocks=4)
    # infinite: 0 + 2 + 0 + 3 of 12; four blocks: [1 2 3], then 3 goes last but one, 1 2 4 are kept, 5 6 7 leave only 1
    assert found.infinite == 5 / 12
    assert found.pooled == 3 / 12
    assert found.pooled_blocks == 4


def test_a_block_behind_a_missing_one_is_no_hit():
    assert lru_rate(trace([1, 2], [9, 2]), blocks=10) == 0.0


def test_the_shipped_slice():
    # The whole trace gives 0.530 with 16,000 blocks, 0.628 with 32,000 and 0.640 without a limit.
    sample = read_trace(SAMPLE)
    found = ceiling(sample, pooled_blocks=1600)
    assert found.infinite == pytest.approx(0.68429, abs=5e-6)
    assert found.pooled == pytest.approx(0.45584, abs=5e-6)
    assert lru_rate(sample, blocks=3200) == pytest.approx(0.58946, abs=5e-6)
