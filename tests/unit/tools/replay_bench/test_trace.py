import contextlib
import json
import random

import pytest

from headrace.router.errors import TraceInvalid
from headrace.tools.replay_bench.trace import (
    SAMPLE,
    Trace,
    TraceRequest,
    accelerate,
    assign,
    ceiling,
    chain_value,
    conversations,
    generate,
    one_shot,
    parse_trace,
    read_trace,
)

GOOD = {"timestamp": 1500, "input_length": 700, "output_length": 20, "hash_ids": [4, 9]}


def lines(*records):
    return [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]


def test_a_line_is_read():
    trace = parse_trace(lines(GOOD, {**GOOD, "timestamp": 1750.5, "hash_ids": [4, 10]}), name="t")
    one, other = trace.requests
    assert (one.at_s, one.tokens, one.output) == (0.0, 700, 20)  # times count from the first request
    assert other.at_s == pytest.approx(0.2505)
    assert one.chain[0] == other.chain[0] == chain_value(4)
    assert one.chain[1] != other.chain[1]
    assert (trace.blocks, trace.rate) == (4, pytest.approx(1 / 0.2505))


def test_blank_lines_are_skipped_and_counted():
    with pytest.raises(TraceInvalid, match=r"^t, line 4: input_length -1 "):
        parse_trace(lines(b"", GOOD, b"  \n", {**GOOD, "input_length": -1}), name="t")


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (b"{", "line 1: no JSON object"),
        (b"\xff\xfe", "line 1: no JSON object"),
        ([1], "line 1: a list instead of an object"),
        ({**GOOD, "timestamp": "now"}, "timestamp 'now'"),
        ({**GOOD, "timestamp": -1}, "timestamp -1"),
        ({**GOOD, "timestamp": True}, "timestamp True"),
        ({**GOOD, "input_length": 0}, "input_length 0"),
        ({**GOOD, "input_length": 7.5}, "input_length 7.5"),
        ({**GOOD, "output_length": None}, "output_length None"),
        ({key: value for key, value in GOOD.items() if key != "output_length"}, "output_length None"),
        ({**GOOD, "hash_ids": []}, r"hash_ids \[\]"),
        ({**GOOD, "hash_ids": "4"}, "hash_ids 4 is no list"),
        ({**GOOD, "hash_ids": [4]}, "1 hash_ids for input_length 700, which is 2 blocks"),
        ({**GOOD, "hash_ids": [4, "x"]}, r"hash_ids\[1\] is 'x'"),
        ({**GOOD, "hash_ids": [4, -2]}, r"hash_ids\[1\] is -2"),
        ({**GOOD, "hash_ids": [4, 2**64]}, rf"hash_ids\[1\] is {2**64}"),
        ({**GOOD, "hash_ids": [True, 4]}, r"hash_ids\[0\] is True"),
        ({**GOOD, "input_length": 10**9, "hash_ids": [1]}, "1 hash_ids for input_length 1000000000"),
    ],
)
def test_a_bad_line_is_refused_by_name_line_and_value(record, told):
    with pytest.raises(TraceInvalid, match=rf"^bad\.jsonl, line 1.*{told}|^bad\.jsonl, {told}"):
        parse_trace(lines(record), name="bad.jsonl")


def test_a_block_list_without_measure_is_refused():
    count = (1 << 16) + 1
    record = {**GOOD, "input_length": count * 512, "hash_ids": list(range(count))}
    with pytest.raises(TraceInvalid, match="65537 blocks; at most 65536"):
        parse_trace(lines(record), name="t")


def test_time_does_not_run_backwards():
    with pytest.raises(TraceInvalid, match=r"^t, line 2: timestamp 1499 is before"):
        parse_trace(lines(GOOD, {**GOOD, "timestamp": 1499}), name="t")


def test_an_empty_or_missing_file(tmp_path):
    with pytest.raises(TraceInvalid, match="no requests"):
        parse_trace([], name="t")
    with pytest.raises(TraceInvalid, match=r"none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceInvalid, match="Is a directory"):
        read_trace(tmp_path)


def test_the_rate_scales_times_only():
    trace = read_trace(SAMPLE, limit=20)
    faster = accelerate(trace, 4.0)
    assert faster.rate == pytest.approx(4 * trace.rate)
    assert [r.chain for r in faster.requests] == [r.chain for r in trace.requests]
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TraceInvalid, match="rate factor"):
            accelerate(trace, factor)


def test_classes_and_tenants_are_drawn_by_seed_and_skew():
    trace = one_shot(requests=3000, seed=3)
    one = assign(trace, classes={"hi": 1, "std": 3}, tenants=5, skew=1.0, seed=7)
    assert one == assign(trace, classes={"hi": 1, "std": 3}, tenants=5, skew=1.0, seed=7)
    assert one != assign(trace, classes={"hi": 1, "std": 3}, tenants=5, skew=1.0, seed=8)
    high = sum(r.request_class == "hi" for r in one.requests)
    assert 650 < high < 850
    load = [sum(r.tenant == f"t{n}" for r in one.requests) for n in range(5)]
    assert sum(load) == 3000
    assert load[0] > 1.6 * load[1] > 1.6 * load[3]


def test_generated_conversations_share_the_first_block_and_grow():
    trace = conversations(requests=800, seed=5)
    assert len(trace.requests) == 800
    assert {r.chain[0] for r in trace.requests} == {chain_value(0)}
    assert [r.at_s for r in trace.requests] == sorted(r.at_s for r in trace.requests)
    assert all(len(r.chain) == -(-r.tokens // 512) for r in trace.requests)
    seen, longest = set(), 0
    for r in trace.requests:  # a later turn brings back the whole blocks of an earlier one
        again = next((n for n, block in enumerate(r.chain) if block not in seen), len(r.chain))
        longest = max(longest, again)
        seen.update(r.chain)
    assert longest > 50
    assert len(seen) > 2000


def test_generators_by_name():
    assert generate("one-shot", requests=10, seed=2) == one_shot(requests=10, seed=2)
    assert generate("conversations", requests=10, seed=2) != generate("conversations", requests=10, seed=3)
    with pytest.raises(TraceInvalid, match="'other'"):
        generate("other", requests=1, seed=0)


@pytest.mark.parametrize("seed", range(50))
def test_damaged_lines_never_escape_as_something_else(seed):
    rng = random.Random(seed)
    raw = bytearray(json.dumps(GOOD).encode())
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    with contextlib.suppress(TraceInvalid):
        assert len(parse_trace([bytes(raw)], name="t").requests) == 1


def trace(*chains):
    return Trace("t", tuple(TraceRequest(at_s=n, tokens=512 * len(c), output=1, chain=tuple(c)) for n, c in enumerate(chains)))


def test_by_hand():
    found = ceiling(trace([1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 2, 4]), pooled_blocks=4)
    # infinite: 0 + 2 + 0 + 3 of 12; four blocks: [1 2 3], then 3 goes last but one, 1 2 4 are kept, 5 6 7 leave only 1
    assert found.infinite == 5 / 12
    assert found.pooled == 3 / 12
    assert found.pooled_blocks == 4
