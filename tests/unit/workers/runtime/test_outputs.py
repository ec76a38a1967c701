"""Log-probabilities of prompts: kept until the end of the answer, and refused where they are too large for a message."""

from __future__ import annotations

import pytest

from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.messages.requests import Generation, Sampling
from headrace.workers.engine import Output
from headrace.workers.errors import RequestInvalid
from headrace.workers.runtime.outputs import check_size, fitting
from tests.support.runtime_bench import Bench, running

PROMPT = [5, 6, 7, 8]
SCORES = [None, *(TokenLogprob(token, b"x", -1.0, [(token, b"x", -1.0)], 1) for token in PROMPT[1:])]


def asked(**sampling) -> Generation:
    return Generation(token_ids=pack_u32(PROMPT), sampling=Sampling(max_tokens=3, **sampling), prompt_logprobs=1)


def allow(bench: Bench, most_bytes: int) -> None:
    bench.session.max_frame_bytes = most_bytes


async def test_they_come_with_the_end_of_every_choice():
    async with running() as bench:
        allow(bench, 10_000)
        await bench.start(asked(), choices=2)
        one, two = (sequence.id for sequence in bench.engine.taken)
        bench.step(Output(one, [1], prompt_logprobs=list(SCORES)), Output(two, [1], prompt_logprobs=list(SCORES)))
        assert bench.session.fins == {}
        bench.step(Output(one, [2], finish="length"), Output(two, [2], finish="length"))
        assert [bench.session.fins[n].prompt_logprobs for n in (0, 1)] == [SCORES, SCORES]


async def test_emitted_tokens_of_an_earlier_run_are_not_the_prompt():
    async with running() as bench:
        allow(bench, 10_000)
        await bench.start(asked(), emitted=[[11, 12]])
        (sequence,) = bench.engine.taken
        assert sequence.token_ids == [*PROMPT, 11, 12]
        more = [TokenLogprob(token, b"y", -2.0) for token in (11, 12)]
        bench.step(Output(sequence.id, [1], finish="length", prompt_logprobs=[*SCORES, *more]))
        assert bench.session.fins[0].prompt_logprobs == SCORES


async def test_an_answer_that_lost_them_with_its_worker_is_no_answer():
    async with running() as bench:
        allow(bench, 10_000)
        await bench.start(asked(), emitted=[[11, 12, 13]])
        assert bench.session.fins == {}
        assert [fault.code for fault in bench.session.failed] == ["resume_impossible"]


async def test_what_cannot_fit_is_refused_before_the_engine_hears_of_it():
    async with running() as bench:
        allow(bench, 60)
        await bench.start(asked())
        assert bench.engine.taken == []
        (fault,) = bench.session.failed
        assert (fault.code, fault.param) == ("invalid_request", "prompt_logprobs")


async def test_what_turns_out_too_large_ends_the_request_and_frees_the_engine():
    async with running() as bench:
        allow(bench, 95)  # enough by the least estimate
        await bench.start(asked(), choices=2)
        one, two = (sequence.id for sequence in bench.engine.taken)
        large = [None, *(TokenLogprob(token, b"x" * 50, -1.0, [], 1) for token in PROMPT[1:])]
        bench.step(Output(one, [1], prompt_logprobs=large))
        await bench.settle()
        (fault,) = bench.session.failed
        assert (fault.code, fault.param) == ("invalid_request", "prompt_logprobs")
        assert set(bench.engine.aborted) == {one, two}


@pytest.mark.parametrize("alternatives", [0, 1, 5])
def test_the_estimate_is_never_above_the_truth(alternatives):
    """Or something that fits would be refused."""
    smallest = TokenLogprob(1, b"x", -1.0, [(n, b"x", -1.0) for n in range(alternatives)], 1)
    items = [None, *[smallest] * 30]
    size = len(encode(items))
    check_size(31, alternatives, most_bytes=size)
    assert fitting(items, prompt_tokens=31, most_bytes=size) == items
    with pytest.raises(RequestInvalid):
        check_size(31, alternatives, most_bytes=size - 5)
    with pytest.raises(RequestInvalid):
        fitting(items, prompt_tokens=31, most_bytes=size - 1)
