"""The simulated engine's batching: what it must never change, and what it must never lose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Output, Sequence
from headrace.workers.errors import EngineOverloaded, RequestInvalid
from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.settings import SequenceFaults, SimSettings
from headrace.workers.sim.tokens import bundled_vocabulary, expected_ids

NONE = SequenceFaults()


def scheduler(**options) -> SimScheduler:
    return SimScheduler(SimSettings(**options), bundled_vocabulary())


def sequence(name: str, tokens: list[int], *, emitted: list[int] | None = None, **options) -> Sequence:
    sampling = {
        key: options.pop(key)
        for key in ("max_tokens", "min_tokens", "stop_token_ids", "seed", "ignore_eos", "temperature")
        if key in options
    }
    return Sequence(
        id=name,
        token_ids=tokens + (emitted or []),
        prompt_tokens=len(tokens),
        sampling=Sampling(**{"max_tokens": 10, **sampling}),
        **options,
    )


def drain(engine: SimScheduler, most_steps: int = 10_000) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for _ in range(most_steps):
        result = engine.step()
        engine.manager.check()
        if result is None:
            return outputs
        for output in result.outputs:
            outputs.setdefault(output.id, []).append(output)
    raise AssertionError("does not come to an end")


def ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.ids]


requests = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt tokens
        st.integers(0, 2),  # which prompts share their beginning
        st.integers(1, 30),  # max_tokens
        st.integers(0, 6),  # arrives after this many steps
        st.integers(0, 1),  # priority
    ),
    min_size=1,
    max_size=8,
)
shapes = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 4, 8]),
        "slots": st.integers(1, 4),
        "step_tokens": st.integers(4, 50),
        "mean_output_tokens": st.sampled_from([0.0, 8.0]),
    }
)


@settings(max_examples=100, deadline=None)
@given(requests, shapes, st.integers(0, 10))
def test_every_sequence_ends_once_with_its_own_tokens_whatever_the_batch(drawn, shape, spare):
    context = 72
    engine = scheduler(**shape, context_length=context, blocks=-(-context // shape["block_size"]) + spare)
    outputs: dict[str, list[Output]] = {}
    late = sorted(enumerate(drawn), key=lambda item: item[1][3])
    step = 0
    while True:
        while late and late[0][1][3] <= step:
            n, (length, family, most, _, priority) = late.pop(0)
            engine.submit(sequence(str(n), [family] * length, max_tokens=most, priority=priority), NONE)
        result = engine.step()
        engine.manager.check()
        step += 1
        if result is None and not late:
            break
        for output in result.outputs if result else ():
            outputs.setdefault(output.id, []).append(output)
        assert step < 5000
    for n, (length, family, most, _, _) in enumerate(drawn):
        mine = outputs[str(n)]
        expected = expected_ids([family] * length, most, mean_tokens=shape["mean_output_tokens"] or None)
        assert ids(mine) == expected
        assert [output.finish is not None for output in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].finish == ("stop" if expected[-1] == 2 else "length")
        assert [output.cached_tokens is not None for output in mine] == [True] + [False] * (len(mine) - 1)
    load = engine.load()
    assert (load.running, load.waiting, load.blocks_used, load.queued_prefill_tokens) == (0, 0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 29), st.integers(0, 40), st.integers(0, 29))
def test_a_resumed_sequence_continues_exactly(length, most, split, least, stop_at):
    prompt = list(range(100, 100 + length))
    stops = expected_ids(prompt, stop_at + 1)[-1:]
    options = {"mean_output_tokens": 12.0, "blocks": 64, "block_size": 4, "context_length": 128}
    whole = scheduler(**options)
    whole.submit(sequence("a", prompt, max_tokens=most, min_tokens=least, stop_token_ids=stops), NONE)
    sampling = Sampling(min_tokens=least, stop_token_ids=stops)
    expected = expected_ids(prompt, most, sampling=sampling, mean_tokens=12.0)
    assert ids(drain(whole)["a"]) == expected
    emitted = expected[: min(split, len(expected) - 1)]
    rest = scheduler(**options)
    left = {"max_tokens": most - len(emitted), "min_tokens": max(0, least - len(emitted))}
    rest.submit(sequence("a", prompt, emitted=emitted, stop_token_ids=stops, **left), NONE)
    assert emitted + ids(drain(rest)["a"]) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 12), st.sets(st.integers(0, 5)))
def test_an_abort_frees_everything_and_nothing_more_comes(lengths, steps, victims):
    engine = scheduler(slots=3, step_tokens=16, block_size=4, blocks=20, context_length=64)
    for n, length in enumerate(lengths):
        engine.submit(sequence(str(n), [n] * length, max_tokens=20), NONE)
    for _ in range(steps):
        engine.step()
    gone = {str(n) for n in victims}
    engine.abort([*gone, "unknown"])
    engine.manager.check()
    assert not gone & drain(engine).keys()
    load = engine.load()
    assert (load.running, load.waiting, load.blocks_used, load.queued_prefill_tokens) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("given_sequence", "param"),
    [
        (sequence("a", [1] * 32), "token_ids"),
        (sequence("a", []), "prompt_tokens"),
        (sequence("a", [1], max_tokens=0), "max_tokens"),
        (sequence("there", [1]), "id"),
    ],
)
def test_an_impossible_sequence_is_refused_by_name(given_sequence, param):
    engine = scheduler(context_length=32)
    engine.submit(sequence("there", [1]), NONE)
    with pytest.raises(RequestInvalid) as refused:
        engine.submit(given_sequence, NONE)
    assert refused.value.param == param


def test_a_full_queue_refuses():
    engine = scheduler(waiting=2)
    engine.submit(sequence("a", [1]), NONE)
    engine.submit(sequence("b", [1]), NONE)
    with pytest.raises(EngineOverloaded):
        engine.submit(sequence("c", [1]), NONE)
    engine.step()
    engine.submit(sequence("c", [1]), NONE)


# -- faults --------------------------------------------------------------------------------------------------


def test_a_stuck_sequence_keeps_its_slot_and_harms_no_other():
    engine = scheduler()
    engine.submit(sequence("stuck", [1, 2]), SequenceFaults(stuck_at_token=3))
    engine.submit(sequence("fine", [3]), NONE)
    outputs = drain(engine)
    assert ids(outputs["stuck"]) == expected_ids([1, 2], 3)
    assert len(ids(outputs["fine"])) == 10
    assert engine.load().running == 1
    engine.abort(["stuck"])
    assert engine.load().blocks_used == 0


@pytest.mark.parametrize("retriable", [True, False])
def test_a_fault_is_the_last_of_a_sequence(retriable):
    engine = scheduler()
    engine.submit(sequence("a", [1]), SequenceFaults(fault_at_token=2, fault_code="oops", fault_retriable=retriable))
    last = drain(engine)["a"][-1]
    assert last.fault is not None
    assert (last.fault.code, last.fault.retriable, last.ids) == ("oops", retriable, [])
    assert engine.load().running == 0


def test_poison_hits_a_resumed_sequence_again_unless_the_fault_is_for_fresh_ones():
    emitted = expected_ids([1], 4)
    for fresh_only, crashes in ((False, True), (True, False)):
        engine = scheduler()
        faults = SequenceFaults(crash_at_token=2, fresh_only=fresh_only)
        engine.submit(sequence("a", [1], emitted=emitted), faults)
        result = engine.step()
        assert result is not None
        assert result.crash is crashes
