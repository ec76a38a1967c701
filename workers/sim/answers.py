"""Answers with restricted tokens: `allowed_token_ids`, the ends of `logit_bias`, and `bad_words`.

A ban changes an answer only where the banned token would have stood.  Allowed tokens, or those forced by a bias of 100, give an
answer made of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

from headrace.broker.blocks import MediaSpan
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.guided import guided_text
from headrace.workers.sim.guided_strings import Draws
from headrace.workers.sim.tokens import FILLER, LONGEST_GROUP, SimAnswer, Vocabulary

_BIAS = 100.0  # a bias of this size forces a token, or bans it


def is_restricted(sampling: Sampling) -> bool:
    return bool(sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids is not None)


class RestrictedAnswer(SimAnswer):
    """An answer under token restrictions. Raises RequestInvalid where no token is left, or a token or word is invalid."""

    __slots__ = ("_bad", "_banned", "_only")

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], *, sampling: Sampling, **options: Any) -> None:
        super().__init__(vocabulary, prompt_ids, sampling=sampling, **options)
        _check_ids(sampling, vocabulary)
        self._bad = [form for word in sampling.bad_words for form in _spellings(word)]
        self._banned = {token for token, bias in sampling.logit_bias.items() if bias <= -_BIAS}
        self._only = self._choice(sampling)
        eos = vocabulary.eos
        if eos in self._banned or (self._only is not None and eos not in self._only):
            self.eos_at = None
        elif self._only == [eos] and not sampling.ignore_eos:
            if sampling.min_tokens:
                raise RequestInvalid(
                    f"only the end token is allowed, and not by min_tokens={sampling.min_tokens}", param="min_tokens"
                )
            self.eos_at = 0
        if self._only is not None and len(self._only) > 1 and eos in self._only:
            self._only.remove(eos)  # the end token ends the answer and is not drawn within it

    def _choice(self, sampling: Sampling) -> list[int] | None:
        """Return the tokens to choose from; None = the usual words."""
        forced = {token for token, bias in sampling.logit_bias.items() if bias >= _BIAS}
        only = set(sampling.allowed_token_ids) if sampling.allowed_token_ids is not None else None
        if forced:
            only = forced if only is None else only & forced
        if only is None:
            if any(self._is_open([], token) for token in set(self._vocabulary.draws) if token >= 0):
                return None
            only = set(range(self._vocabulary.size)) - self._vocabulary.table.special
        left = sorted(token for token in only if self._is_open([], token))
        if not left:
            raise RequestInvalid(
                "allowed_token_ids, logit_bias and bad_words together leave no token to say",
                param="allowed_token_ids" if sampling.allowed_token_ids is not None else "logit_bias",
            )
        return left

    def grow(self) -> None:
        """Draw the next tokens; a banned one is replaced by the next best."""
        ids, drawn = self.ids, self._drawn()
        end = len(ids) + len(drawn)
        for bits in drawn:
            group = self._pick(bits)
            if len(group) == 1 or len(ids) + LONGEST_GROUP <= end:
                ids += group
        while len(ids) < end:
            ids += self._pick(FILLER, single=True)
        del ids[end:]

    def _pick(self, bits: int, *, single: bool = False) -> Sequence[int]:
        fitting = (group for group in self._candidates(bits) if (len(group) == 1 or not single) and self._fits(group))
        # Where `bad_words` leaves none of the allowed tokens, one of them is used all the same.
        return next(fitting, None) or next(group for group in self._candidates(bits) if len(group) == 1)

    def _candidates(self, bits: int) -> Iterator[Sequence[int]]:
        """Yield the drawn token, or the tokens of a character, and then the alternatives."""
        only = self._only
        if only is not None:
            yield from ([only[(bits + number) % len(only)]] for number in range(len(only)))
            return
        draws, groups = self._vocabulary.draws, self._vocabulary.groups
        for number in range(len(draws)):
            token = draws[(bits + number) % len(draws)]
            yield [token] if token >= 0 else groups[-1 - token]

    def _fits(self, group: Sequence[int]) -> bool:
        said = list(self.ids[-64:]) if self._bad else []
        for token in group:
            if not self._is_open(said, token):
                return False
            said.append(token)
        return True

    def _is_open(self, said: Sequence[int], token: int) -> bool:
        return token not in self._banned and not any(self._completes(said, token, word) for word in self._bad)

    def _completes(self, said: Sequence[int], token: int, word: bytes) -> bool:
        """Return true when whole tokens, this one last, spell the word."""
        piece, left, at = self._vocabulary.table.token_bytes(token), word, len(said)
        while piece and left.endswith(piece):
            left = left[: -len(piece)]
            if not left:
                return True
            at -= 1
            if at < 0:
                return False
            piece = self._vocabulary.table.token_bytes(said[at])
        return False


def _spellings(word: str) -> tuple[bytes, ...]:
    """Return the word's bytes at the start of a text, and after another word."""
    if not word.strip():
        raise RequestInvalid(f"bad_words: {word!r} is no word", param="bad_words")
    plain = word.strip(" ").encode(errors="replace")
    return plain, b" " + plain


def _check_ids(sampling: Sampling, vocabulary: Vocabulary) -> None:
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise RequestInvalid("allowed_token_ids is empty", param="allowed_token_ids")
    for param, tokens in (("allowed_token_ids", sampling.allowed_token_ids or ()), ("logit_bias", sampling.logit_bias)):
        for token in tokens:
            if not 0 <= token < vocabulary.size:
                raise RequestInvalid(f"{param}: the vocabulary has {vocabulary.size} tokens, and no token {token}", param=param)


PRESCRIBED = "sim_answer"
"""The extra field of a request that holds the text to answer with."""


def answer_to(
    sequence: EngineSequence,
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


def _prescribed(sequence: EngineSequence, vocabulary: Vocabulary) -> list[int]:
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
