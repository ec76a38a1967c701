"""Holds the state of a choice of a run while the engine works on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.broker.messages.frames import FinishReason, TokenLogprob
from headrace.broker.messages.requests import Generation
from headrace.broker.protocol.run import Run
from headrace.workers.detokenize import TextPipeline
from headrace.workers.engine import Fault, Handover, StoredTensor
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.parsing.interface import ParsedAnswer, ParseRequirements

AnswerText = TextPipeline | ParsedAnswer
"""The pipeline for the tokens of a choice: to plain text, or to parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    generation: Generation
    prompt: list[int]
    limit: int  # most tokens of a choice in all
    expected_cached: int = 0  # tokens of the prompt that the engine should find in its cache
    prompt_embeds: StoredTensor | None = None
    requirements: ParseRequirements | None = None  # set if the answer is parsed
    first_token_reported: list[bool] = field(default_factory=list)  # empty until a choice has its first token


class ChoiceRun:
    """A choice of a run, while the engine works on it."""

    __slots__ = (
        "_base_id",
        "cached_elsewhere",
        "cached_tokens",
        "choice",
        "computed_elsewhere",
        "expected_cached",
        "first_s",
        "first_token",
        "first_token_reported",
        "generation",
        "handed_s",
        "id",
        "limit",
        "pipeline",
        "plain",
        "prompt",
        "prompt_embeds",
        "prompt_logprobs",
        "prompt_tokens",
        "push",
        "requirements",
        "run",
        "started_s",
    )

    def __init__(self, run: Run, choice: int, request: RunRequest, pipeline: AnswerText) -> None:
        self.id = self._base_id = f"{run.id}-{run.attempt}-{run.run & 0xFFFF:04x}-{choice}"
        self.run = run
        self.choice = choice
        self.generation = request.generation
        self.prompt = request.prompt
        self.prompt_tokens = len(request.prompt)  # until the engine reports that media make the prompt longer
        self.prompt_embeds = request.prompt_embeds
        self.limit = request.limit
        self.pipeline = pipeline
        self.push = pipeline.pusher if isinstance(pipeline, TextPipeline) else pipeline.push
        self.plain = False  # True after the first output without stop strings: each token is one text and nothing else
        self.requirements = request.requirements
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.expected_cached = request.expected_cached
        self.first_token_reported = request.first_token_reported
        self.started_s = 0.0
        self.first_s = 0.0
        self.first_token: asyncio.Future[Fault | None] | None = (
            None  # result of a hand-over: None at the first token, or a fault
        )
        self.handed_s: float | None = None  # when the blocks that another worker has computed were ready to be fetched
        self.computed_elsewhere = 0  # prompt tokens that another worker computed for this choice
        self.cached_elsewhere = 0  # prompt tokens that this other worker had cached

    def renew(self, suffix: str) -> str:
        """Set and return a new id, for another try in an engine that may still know the last id. Empty suffix: the first id."""
        self.id = f"{self._base_id}~{suffix}" if suffix else self._base_id
        return self.id

    def sequence(self, handover: Handover | None = None) -> EngineSequence:
        """Build the engine's sequence for the rest of this choice. Emitted tokens are a forced prefix."""
        generation = self.generation
        emitted = self.run.choices[self.choice].ids
        count = len(emitted)
        sampling = generation.sampling
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=self.limit - count,
            min_tokens=max(0, sampling.min_tokens - count),
            seed=None if sampling.seed in (None, -1) else sampling.seed + self.choice,  # -1 is no seed, as in vLLM
        )
        return EngineSequence(
            id=self.id,
            token_ids=self.prompt + emitted if emitted else self.prompt,
            prompt_tokens=len(self.prompt),
            sampling=sampling,
            logprobs=generation.logprobs,
            prompt_logprobs=generation.prompt_logprobs,
            guided=generation.guided,
            adapter=generation.adapter,
            cache_salt=generation.cache_salt,
            session_id=generation.session_id,
            priority=self.run.engine_priority,
            rank=self.run.rank,
            media=generation.media,
            prompt_embeds=self.prompt_embeds,
            handover=handover,
            expected_cached=self.expected_cached,
            reasoning_ended=self.requirements.reasoning_ended if self.requirements is not None else None,
            reasoning_kwargs=self.requirements.reasoning_kwargs if self.requirements is not None else None,
            trace=self.run.envelope.trace,
            extra=generation.extra,
        )

    def verdict(self, reason: FinishReason) -> tuple[FinishReason, int]:
        """Return the finish reason for the client and the number of reasoning tokens, once the text is finished.

        Raises AnswerUnreadable.
        """
        return (reason, 0) if isinstance(self.pipeline, TextPipeline) else self.pipeline.verdict(reason)

    @property
    def tokens(self) -> int:
        """Return the number of tokens that must be in the cache before the next token can be computed."""
        return len(self.prompt) + len(self.run.choices[self.choice].ids)

    @property
    def uncached(self) -> int:
        """Return the number of these tokens that this engine would have to compute, as far as is known."""
        return self.tokens - self.expected_cached


# Replays the emitted tokens of a resumed answer through its pipeline, without output and in time slices.
#
# A parser takes up to some tenths of a millisecond per token, and an answer may have tens of thousands of tokens. The slices
# run on the event loop rather than in a thread, because the parsers share tokenizers with the rest of the process, and
# tokenizers are not safe for two threads at once.

INLINE_TOKENS = 64  # so few tokens are replayed without slices
SLICE_S = 0.003


def tokens_to_replay(choices: Sequence[ChoiceRun]) -> int:
    return sum(len(choice.run.choices[choice.choice].ids) for choice in choices)


def replay(choices: Sequence[ChoiceRun]) -> None:
    """Replay all tokens at once. Raises AnswerUnreadable."""
    for _ in _steps(choices):
        pass


async def replay_in_slices(choices: Sequence[ChoiceRun], *, clock: Callable[[], float] = time.monotonic) -> None:
    """Replay all tokens, yielding to the event loop every few milliseconds. Raises AnswerUnreadable."""
    until = clock() + SLICE_S
    for _ in _steps(choices):
        if clock() >= until:
            await asyncio.sleep(0)
            until = clock() + SLICE_S


def _steps(choices: Sequence[ChoiceRun]) -> Iterator[None]:
    for choice in choices:
        push = choice.pipeline.push
        for token in list(choice.run.choices[choice.choice].ids):
            push(token)
            yield
