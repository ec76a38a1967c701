"""Chooses the answer of a sequence: drawn words, or the text that the request prescribes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

from headrace.broker.blocks import MediaSpan
from headrace.workers.engine import Sequence
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.answers.guided.strings import Draws
from headrace.workers.sim.answers.guided.texts import guided_text
from headrace.workers.sim.answers.token_constraints import RestrictedAnswer, is_restricted
from headrace.workers.sim.answers.tokens import SimAnswer, Vocabulary

PRESCRIBED = "sim_answer"
"""The extra field of a request that holds the text to answer with."""


def answer_to(
    sequence: Sequence,
    vocabulary: Vocabulary,
    *,
    mean_tokens: float | None = None,
    media: Seq[MediaSpan] = (),
    taint: int = 0,
) -> SimAnswer:
    """Chooses the answer. It is a pure function of the arguments; emitted tokens and everything else of a resume do not count.

    Raises RequestInvalid or UnsupportedByEngine.
    """
    sampling = sequence.sampling
    prescribed = PRESCRIBED in sequence.extra and not taint  # with wrong blocks the engine has not read the prompt
    plain = prescribed or sequence.guided or not is_restricted(sampling)
    answer = (SimAnswer if plain else RestrictedAnswer)(
        vocabulary,
        sequence.token_ids[: sequence.prompt_tokens],
        sampling=sampling,
        adapter=sequence.adapter,
        mean_tokens=mean_tokens,
        media=media,
        taint=taint,
    )
    if prescribed:
        answer.prescribe(_prescribed(sequence, vocabulary), ends=not sampling.ignore_eos)
    elif sequence.guided:
        try:
            answer.prescribe(_guided(sequence.guided, answer, vocabulary), ends=True, closed=True)
        except RequestInvalid:
            if not taint:  # with wrong blocks the request cannot be refused any more
                raise
    return answer


def _prescribed(sequence: Sequence, vocabulary: Vocabulary) -> list[int]:
    text = sequence.extra[PRESCRIBED]
    if not isinstance(text, str):
        raise RequestInvalid(f"{PRESCRIBED} must be a text, not {type(text).__name__}", param=PRESCRIBED)
    if vocabulary.eos is None and not sequence.sampling.ignore_eos:
        raise RequestInvalid(f"{PRESCRIBED}: this tokenizer names no end token to end the answer with", param=PRESCRIBED)
    return vocabulary.speller.spell(text, param=PRESCRIBED)


def _guided(guided: Mapping[str, Any], answer: SimAnswer, vocabulary: Vocabulary) -> list[int]:
    if vocabulary.eos is None:
        raise RequestInvalid("structured output: this tokenizer names no end token to end it with", param="guided")
    text = guided_text(guided, Draws(answer.key + b"guided", _words(vocabulary)))
    return vocabulary.speller.spell(text, param="guided")


@lru_cache(maxsize=4)
def _words(vocabulary: Vocabulary) -> list[str]:
    words = (vocabulary.table.token_bytes(token).decode().strip() for token in dict.fromkeys(vocabulary.draws) if token >= 0)
    return [word for word in words if word.isalpha()]
