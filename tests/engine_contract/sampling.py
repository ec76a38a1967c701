"""Contract of sampling, for engines that compute a model: each parameter does what its name says, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from tests.engine_contract.subject import Subject, emitted, greedy


def drawn(tokens: int, **options: Any) -> Sampling:
    return Sampling(temperature=2.0, max_tokens=tokens, ignore_eos=True, **options)


class SamplingContract:
    """The parameters of `Sampling` that change which token comes next."""

    @pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=["top_k", "top_p", "min_p"])
    async def test_a_draw_among_one_token_is_the_likeliest(self, subject: Subject, narrow: dict[str, Any]) -> None:
        prompt = subject.prompt(800)
        likeliest = await subject.ids(prompt, greedy(12))
        assert await subject.ids(prompt, drawn(12)) != likeliest, "at this temperature others are drawn"
        assert await subject.ids(prompt, drawn(12, **narrow)) == likeliest

    async def test_a_bias_forbids_and_forces_tokens(self, subject: Subject) -> None:
        prompt = subject.prompt(801)
        free = await subject.ids(prompt, greedy(8))
        without = await subject.ids(prompt, greedy(8, logit_bias={free[0]: -100.0}))
        assert free[0] not in without
        forced = next(token for token in range(1000, 1100) if token not in free)
        assert await subject.ids(prompt, greedy(8, logit_bias={forced: 100.0})) == [forced] * 8

    @pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
    async def test_a_penalty_makes_repetition_rarer(self, subject: Subject, penalty: str) -> None:
        prompt = subject.encode("One two three one two three one two three one two three")
        free = await subject.ids(prompt, greedy(24))
        assert len(set(free)) < len(free), "there is something to repeat"
        penalized = await subject.ids(prompt, greedy(24, **{penalty: 2.0}))
        assert len(set(penalized)) > len(set(free))

    async def test_an_answer_that_would_end_goes_on_to_the_least_number_of_tokens(self, subject: Subject) -> None:
        (end,) = subject.encode("<|im_end|>")
        prompt, ending = subject.prompt(803), {"logit_bias": {end: 100.0}}
        free = await subject.run(prompt, greedy(8, ignore_eos=False, **ending))
        assert free[-1].finish == "stop", "it ends by itself"
        least = len(emitted(free)) + 5
        longer = await subject.ids(prompt, greedy(least + 8, ignore_eos=False, min_tokens=least, **ending))
        assert least <= len(longer) < least + 8, "it ends when it may"
        assert len(await subject.ids(prompt, greedy(least, **ending))) == least, "no end token ends it"

    @pytest.mark.parametrize("parameter", ["allowed_token_ids", "bad_words"])
    async def test_words_are_allowed_and_forbidden_or_refused(self, subject: Subject, parameter: str) -> None:
        prompt = subject.encode("The capital of France is")
        free = await subject.ids(prompt, greedy(8))
        # vLLM forbids a word with a space before it only where it has as many tokens without
        word = next(n for n in free if subject.encode(t := subject.text([n])) == [n] and len(subject.encode(t.strip())) == 1)
        value: Any = [700, 701] if parameter == "allowed_token_ids" else [subject.text([word])]
        answer: list[int] = []
        refused: str | None = None
        try:
            answer = await subject.ids(prompt, greedy(8, **{parameter: value}))
        except (UnsupportedByEngine, RequestInvalid) as error:
            refused = error.param
        if not answer:
            assert refused == parameter
            await subject.idle()
            return
        if parameter == "allowed_token_ids":
            assert set(answer) <= {700, 701}
        else:
            assert word not in answer
