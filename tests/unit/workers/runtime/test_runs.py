from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.broker.codec import pack_u32
from headrace.broker.messages.requests import Generation, Sampling
from headrace.broker.protocol.run import Run
from headrace.workers.detokenize import StopStrings
from headrace.workers.engine import Capabilities, Output
from headrace.workers.errors import UnsupportedByEngine
from headrace.workers.runtime.runs import cannot_resume
from tests.support.runtime_bench import running
from tests.unit.workers.test_prompt_embeds import file, pickled

LESS = Capabilities()
ALL = Capabilities(resume_penalties=True, resume_repetition=True)


def run(*ids: int) -> Run:
    return cast("Run", SimpleNamespace(choices=[SimpleNamespace(ids=list(ids), settled=False)]))


def generation(**sampling: Any) -> Generation:
    return Generation(token_ids=[1], sampling=Sampling(max_tokens=8, **sampling))


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"repetition_penalty": 1.2}, "repetition"),
        ({"presence_penalty": 0.1}, "presence"),
        ({"frequency_penalty": -1}, "frequency"),
    ],
)
def test_penalties_that_the_engine_cannot_carry_over_stop_a_resume_by_name(sampling: dict[str, float], word: str) -> None:
    reason = cannot_resume(run(5), generation(**sampling), LESS)
    assert reason is not None
    assert word in reason
    assert cannot_resume(run(), generation(**sampling), LESS) is None, "nothing was emitted, so it begins again"
    assert cannot_resume(run(5), generation(**sampling), ALL) is None


def test_a_plain_answer_is_resumed() -> None:
    assert cannot_resume(run(5), generation(), LESS) is None


EMBEDS = file(pickled((3, 2), (2, 1)), struct.pack("<6f", *range(6)))


@pytest.mark.parametrize(("seed", "seeds"), [(7, [7, 8, 9]), (None, [None] * 3), (-1, [None] * 3)])
async def test_choices_have_the_seeds_that_vllm_gives_them(seed, seeds):
    async with running() as bench:
        await bench.start(Generation(token_ids=pack_u32([5]), sampling=Sampling(max_tokens=3, seed=seed)), choices=3)
        assert [sequence.sampling.seed for sequence in bench.engine.taken] == seeds


async def test_embeddings_stand_for_as_many_tokens_as_they_have_rows():
    async with running() as bench:
        generation = Generation(token_ids=b"", sampling=Sampling(max_tokens=3), prompt_embeds=EMBEDS)
        await bench.start(generation, emitted=[[11]])
        (sequence,) = bench.engine.taken
        assert (sequence.token_ids, sequence.prompt_tokens, sequence.sampling.max_tokens) == ([0, 0, 0, 11], 3, 2)
        assert sequence.prompt_embeds is not None
        assert (sequence.prompt_embeds.dtype, sequence.prompt_embeds.shape) == ("float32", (3, 2))
        bench.step(Output(sequence.id, [4, 5], finish="length"))
        assert bench.session.fins[0].prompt_tokens == 3


async def test_embeddings_that_cannot_be_read_or_are_too_many_are_refused_by_name():
    async with running() as bench:
        await bench.start(Generation(token_ids=b"", prompt_embeds=b"nonsense"))
        await bench.start(Generation(token_ids=b"", prompt_embeds=file(pickled((100, 1), (1, 1)), b"0" * 400)))
        assert [fault.param for fault in bench.session.failed] == ["prompt_embeds", "prompt"]
        assert bench.engine.taken == []


async def test_an_engine_that_takes_no_embeddings_is_named_with_the_parameter():
    async with running() as bench:
        bench.engine.refuse = UnsupportedByEngine("not here", param="prompt_embeds")  # type: ignore[assignment]
        await bench.start(Generation(token_ids=b"", prompt_embeds=EMBEDS))
        (fault,) = bench.session.failed
        assert (fault.code, fault.param) == ("invalid_request", "prompt_embeds")


async def test_a_request_of_a_direct_publisher_is_held_to_the_limits_of_the_frontend():
    async with running() as bench:
        await bench.start(Generation(token_ids=pack_u32([5]), stop=["a" * 4097]))
        assert bench.engine.taken == []
        (fault,) = bench.session.failed
        assert (fault.code, fault.param) == ("invalid_request", "stop")


async def test_the_automaton_of_the_stop_strings_is_made_once_for_all_choices(monkeypatch):
    made = []
    build = StopStrings._build
    monkeypatch.setattr(StopStrings, "_build", lambda self, stops: made.append(stops) or build(self, stops))
    async with running() as bench:
        await bench.start(Generation(token_ids=pack_u32([5]), sampling=Sampling(max_tokens=3), stop=["ab", "bc"]), choices=4)
        assert (len(bench.engine.taken), made) == (4, [["ab", "bc"]])
