"""One choice of one run, while an engine works on it."""

from __future__ import annotations

import asyncio

import msgspec

from headrace.broker.messages import FinishReason, Generation, TokenLogprob
from headrace.broker.protocol.run import Run
from headrace.workers.engine import Fault, Handover, Sequence
from headrace.workers.parsing.answer import ParsedAnswer
from headrace.workers.parsing.interface import ParseRequirements
from headrace.workers.prompt_embeds import StoredTensor
from headrace.workers.text.pipeline import TextPipeline

AnswerText = TextPipeline | ParsedAnswer
"""What its tokens become: plain text, or parts."""


class ChoiceRun:
    """One choice of one run, while the engine works on it."""

    __slots__ = (
        "_base_id",
        "cached_elsewhere",
        "cached_tokens",
        "came",
        "choice",
        "computed_elsewhere",
        "expected_cached",
        "first_s",
        "generation",
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
        "told",
    )

    def __init__(
        self,
        run: Run,
        choice: int,
        generation: Generation,
        prompt: list[int],
        limit: int,
        pipeline: AnswerText,
        *,
        expected_cached: int = 0,
        told: list[bool],
        prompt_embeds: StoredTensor | None = None,
        requirements: ParseRequirements | None = None,
    ) -> None:
        self.id = self._base_id = f"{run.id}-{run.attempt}-{run.run & 0xFFFF:04x}-{choice}"
        self.run = run
        self.choice = choice
        self.generation = generation
        self.prompt = prompt
        self.prompt_tokens = len(prompt)  # until the engine says that its media take more
        self.prompt_embeds = prompt_embeds
        self.limit = limit  # most tokens this choice may have in all
        self.pipeline = pipeline
        self.push = pipeline.pusher if isinstance(pipeline, TextPipeline) else pipeline.push
        self.plain = False  # after the first output, if no stop string is looked for: a token is one text and nothing else
        self.requirements = requirements  # for the sake of the parsers
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.expected_cached = expected_cached
        self.told = told  # shared by the choices of a run: empty until one of them has its first token
        self.started_s = 0.0
        self.first_s = 0.0
        self.came: asyncio.Future[Fault | None] | None = None  # of a hand-over: its first token, or why there is none
        self.computed_elsewhere = 0  # prompt tokens that another worker has computed for it …
        self.cached_elsewhere = 0  # … and those it had cached

    def renew(self, suffix: str) -> str:
        """A new id, for another try in an engine that may still know the last one. Empty = the plain one."""
        self.id = f"{self._base_id}~{suffix}" if suffix else self._base_id
        return self.id

    def sequence(self, handover: Handover | None = None) -> Sequence:
        """What is left to do, as the engine sees it: emitted tokens are a forced prefix."""
        generation = self.generation
        emitted = self.run.choices[self.choice].ids
        sampling = generation.sampling
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=self.limit - len(emitted),
            min_tokens=max(0, sampling.min_tokens - len(emitted)),
            seed=None if sampling.seed in (None, -1) else sampling.seed + self.choice,  # -1: none, as vLLM has it
        )
        return Sequence(
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
            priority=self.run.envelope.priority,
            media=generation.media,
            prompt_embeds=self.prompt_embeds,
            handover=handover,
            expected_cached=self.expected_cached,
            reasoning_ended=self.requirements.reasoning_ended if self.requirements is not None else None,
            reasoning_kwargs=self.requirements.reasoning_kwargs if self.requirements is not None else None,
            extra=generation.extra,
        )

    def verdict(self, reason: FinishReason) -> tuple[FinishReason, int]:
        """Once its text is finished: why it ended, as the client is told, and how many tokens of it were reasoning.

        Raises AnswerUnreadable.
        """
        return (reason, 0) if isinstance(self.pipeline, TextPipeline) else self.pipeline.verdict(reason)

    @property
    def tokens(self) -> int:
        """What has to be in the cache before the next token can be made."""
        return len(self.prompt) + len(self.run.choices[self.choice].ids)

    @property
    def uncached(self) -> int:
        """Of these, what this engine would have to compute, as far as can be told."""
        return self.tokens - self.expected_cached
