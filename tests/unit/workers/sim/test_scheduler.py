"""The simulated engine's batching: what it must never change, and what it must never lose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Output, Sequence
from headrace.workers.errors import EngineOverloaded, RequestInvalid
from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.settings import Faults, SequenceFaults, SimSettings
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


def test_scarce_blocks_preempt_the_last_that_came_and_lose_nothing():
    engine = scheduler(blocks=8, block_size=4, context_length=32, slots=4)
    for n in range(3):
        engine.submit(sequence(str(n), [n] * 8, max_tokens=20), NONE)
    outputs = drain(engine)
    assert engine.preemptions > 0
    assert all(ids(outputs[str(n)]) == expected_ids([n] * 8, 20) for n in range(3))


def test_the_last_that_came_is_the_one_preempted():
    engine = scheduler(blocks=8, block_size=4, context_length=32, slots=4)
    for n in range(3):
        engine.submit(sequence(str(n), [n] * 8, max_tokens=20), NONE)
    ended = []
    while (result := engine.step()) is not None:
        ended += [output.id for output in result.outputs if output.finish]
    assert ended == ["0", "1", "2"]


def test_blocks_of_its_own_found_again_after_a_preemption_do_not_count_as_cached():
    engine = scheduler(blocks=6, block_size=4, context_length=24, slots=2, step_tokens=8)
    engine.submit(sequence("a", [1] * 8, max_tokens=5), NONE)
    engine.submit(sequence("b", [2] * 23, max_tokens=1), NONE)
    outputs = drain(engine)
    assert engine.preemptions > 0
    assert outputs["b"][0].cached_tokens == 0


def test_what_is_cached_is_not_queued():
    engine = scheduler(blocks=16, block_size=4, context_length=32, slots=1, step_tokens=4)
    engine.submit(sequence("a", [1] * 16, max_tokens=1), NONE)
    drain(engine)
    engine.submit(sequence("b", [2] * 8, max_tokens=1), NONE)
    engine.submit(sequence("c", [1] * 16, max_tokens=1), NONE)
    assert engine.load().queued_prefill_tokens == 8 + 4  # of a prompt that is all there, the last block is computed again
    engine.step()
    load = engine.load()
    assert (load.queued_prefill_tokens, load.step_prefill_tokens, load.step_decodes) == (4 + 4, 4, 0)
    drain(engine)
    assert engine.load().queued_prefill_tokens == 0


def test_an_abort_after_a_preemption_leaves_no_debt():
    engine = scheduler(blocks=8, block_size=4, context_length=32, slots=4)
    for n in range(3):
        engine.submit(sequence(str(n), [n] * 8, max_tokens=20), NONE)
    while not engine.preemptions:
        engine.step()
    load = engine.load()
    assert load.waiting == 1
    assert load.queued_prefill_tokens > 0  # most of it is cached still
    engine.abort(["0", "1", "2"])
    assert (engine.load().waiting, engine.load().queued_prefill_tokens, engine.load().blocks_used) == (0, 0, 0)


def test_a_shared_beginning_is_computed_once():
    engine = scheduler(block_size=4)
    engine.submit(sequence("a", [7] * 17), NONE)
    assert drain(engine)["a"][0].cached_tokens == 0
    engine.submit(sequence("b", [7] * 17), NONE)
    result = engine.step()
    assert result is not None
    assert result.outputs[0].cached_tokens == 16
    assert result.prefill_tokens == 1


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block():
    engine = scheduler(block_size=4)
    for name in "ab":
        engine.submit(sequence(name, [7] * 16), NONE)
        outputs = drain(engine)
    assert outputs["b"][0].cached_tokens == 12


def test_adapters_and_salts_share_no_blocks():
    engine = scheduler(block_size=4)
    for name, options in (("a", {}), ("b", {"adapter": "x"}), ("c", {"cache_salt": "y"})):
        engine.submit(sequence(name, [7] * 17, **options), NONE)
        assert drain(engine)[name][0].cached_tokens == 0


def test_answers_are_cached_for_the_next_turn():
    engine = scheduler(block_size=4)
    engine.submit(sequence("a", [7] * 8, max_tokens=9), NONE)
    answer = ids(drain(engine)["a"])
    engine.submit(sequence("b", [7] * 8 + answer + [1, 2]), NONE)
    assert drain(engine)["b"][0].cached_tokens == 16


def test_a_long_prompt_is_computed_in_parts_beside_decoding():
    engine = scheduler(step_tokens=70, slots=4)
    engine.submit(sequence("short", [1], max_tokens=50), NONE)
    engine.step()
    engine.submit(sequence("long", [2] * 200), NONE)
    steps = [engine.step() for _ in range(3)]
    assert [(step.prefill_tokens, step.decoded) for step in steps if step] == [(69, 1), (69, 1), (62, 1)]


def test_the_better_priority_starts_first():
    engine = scheduler(slots=1)
    for name, priority in (("low", 5), ("high", 1)):
        engine.submit(sequence(name, [1, 2], max_tokens=2, priority=priority), NONE)
    assert list(drain(engine)) == ["high", "low"]


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


def test_the_context_length_ends_an_answer():
    engine = scheduler(context_length=32)
    engine.submit(sequence("a", [1] * 30, max_tokens=100), NONE)
    outputs = drain(engine)["a"]
    assert len(outputs) == 2
    assert outputs[-1].finish == "length"


def test_a_stop_token_is_named():
    stop = expected_ids([4], 10)[6]
    engine = scheduler()
    engine.submit(sequence("a", [4], stop_token_ids=[stop]), NONE)
    last = drain(engine)["a"][-1]
    assert (last.finish, last.stop, last.ids) == ("stop", stop, [stop])


def test_logprobs_come_with_every_token_when_asked_for():
    engine = scheduler()
    engine.submit(sequence("a", [4], logprobs=2), NONE)
    for output in drain(engine)["a"]:
        assert output.logprobs is not None
        assert [row.id for row in output.logprobs] == output.ids
        assert len(output.logprobs[0].top) == 2


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


def test_a_crash_lets_nothing_of_its_step_out():
    engine = scheduler()
    engine.submit(sequence("a", [1]), SequenceFaults(crash_at_token=2))
    results = [engine.step() for _ in range(3)]
    assert [result.crash for result in results if result] == [False, False, True]


def test_poison_hits_a_resumed_sequence_again_unless_the_fault_is_for_fresh_ones():
    emitted = expected_ids([1], 4)
    for fresh_only, crashes in ((False, True), (True, False)):
        engine = scheduler()
        faults = SequenceFaults(crash_at_token=2, fresh_only=fresh_only)
        engine.submit(sequence("a", [1], emitted=emitted), faults)
        result = engine.step()
        assert result is not None
        assert result.crash is crashes


def test_the_engine_dies_at_its_step():
    engine = scheduler(faults=Faults(die_at_step=2))
    engine.submit(sequence("a", [1]), NONE)
    results = [engine.step() for _ in range(3)]
    assert [result.died is not None for result in results if result] == [False, False, True]


def test_an_engine_that_dies_at_a_token_names_the_sequence():
    engine = scheduler()
    engine.submit(sequence("a", [1]), SequenceFaults(die_at_token=2))
    engine.submit(sequence("b", [2]), NONE)
    results = [result for _ in range(4) if (result := engine.step())]
    assert [result.died is not None for result in results] == [False, False, True, True]
    assert results[2].blamed == {"a"}
    assert results[0].blamed == frozenset()


def test_a_slow_engine_takes_longer():
    durations = []
    for slow in (1.0, 3.0):
        engine = scheduler(timing="cpu-small", faults=Faults(slow=slow))
        engine.submit(sequence("a", [1]), NONE)
        result = engine.step()
        assert result is not None
        durations.append(result.duration_s)
    assert durations[1] == pytest.approx(3 * durations[0])


def test_what_is_left_of_the_running_step_is_still_to_be_computed():
    engine = scheduler(timing="h100-8b", step_tokens=256)
    engine.submit(sequence("a", list(range(1000))), NONE)
    result = engine.step()
    assert result is not None
    assert result.prefill_tokens == 256
    left = [engine.load(part * result.duration_s).queued_prefill_tokens for part in (1.0, 0.5, 0.0)]
    assert left == [1000, 872, 744]
    assert engine.load(-1.0).queued_prefill_tokens == 744
