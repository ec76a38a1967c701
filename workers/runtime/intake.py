"""Builds the choices for the engine from the payload of a claimed job."""

from __future__ import annotations

from collections.abc import Callable, Container

import msgspec

from headrace.broker.codec import decode, unpack_u32, unpack_u64
from headrace.broker.errors import RequestOverLimit
from headrace.broker.messages import Generation
from headrace.broker.protocol.run import Run
from headrace.broker.request_limits import check_limits
from headrace.workers.engine import EngineInfo
from headrace.workers.errors import RequestInvalid
from headrace.workers.kv.cached_prefix import cached_tokens
from headrace.workers.parsing.answer import ParsedAnswer
from headrace.workers.parsing.interface import ParsePlan, ParserSet
from headrace.workers.prompt_embeds import read_matrix
from headrace.workers.runtime.choice import AnswerText, ChoiceRun, RunRequest
from headrace.workers.text.pipeline import TextPipeline, TokenTable
from headrace.workers.text.stops import StopStrings


class ChoiceIntake:
    """Builds the choices of jobs. Without `parsers` answers are plain text."""

    def __init__(self, info: EngineInfo, table: TokenTable, parsers: ParserSet | None = None) -> None:
        self._info = info
        self._table = table
        self._parsers = parsers

    def take(
        self, run: Run, payload: bytes, *, cache: Callable[[], Container[int]] | None = None
    ) -> tuple[Generation, list[ChoiceRun]]:
        """Return the generation options for the engine, and the unfinished choices.

        The tokens that the choices have already emitted are still to be replayed (`headrace.workers.runtime.replay`).
        Raises WireError and RequestInvalid.
        """
        generation = decode(Generation, payload)
        prompt = unpack_u32(generation.token_ids)
        embeds = None
        if generation.prompt_embeds is not None:
            embeds = read_matrix(generation.prompt_embeds, param="prompt_embeds")
            prompt = [0] * embeds.shape[0]
        room = self._info.context_length - len(prompt)
        if not prompt:
            raise RequestInvalid("the prompt is empty", param="prompt")
        if room < 1:
            raise RequestInvalid(
                f"the prompt has {len(prompt)} tokens; the context length is {self._info.context_length}", param="prompt"
            )
        try:
            check_limits(generation, choices=run.envelope.choices, prompt_tokens=len(prompt))
        except RequestOverLimit as error:  # of a publisher that has asked no frontend
            raise RequestInvalid(str(error), param=error.param) from None
        plan = self._plan(generation, prompt)
        if plan is not None:
            needed = plan.requirements
            generation = msgspec.structs.replace(
                generation, guided=needed.guided, skip_special_tokens=needed.skip_special_tokens
            )
        wanted = generation.sampling.max_tokens
        limit = room if wanted is None else min(wanted, room)
        expected = self._expected_cached(run, len(prompt), cache)
        request = RunRequest(
            generation=generation,
            prompt=prompt,
            limit=limit,
            expected_cached=expected,
            prompt_embeds=embeds,
            requirements=plan.requirements if plan is not None else None,
        )
        stops = StopStrings(generation.stop) if any(generation.stop) else ()
        choices = []
        for index, log in enumerate(run.choices):
            if log.settled:
                continue
            choice = ChoiceRun(run, index, request, self._answer(request, plan, run, index, stops))
            choices.append(choice)
        return generation, choices

    def _plan(self, generation: Generation, prompt: list[int]) -> ParsePlan | None:
        if generation.parse is None:
            return None
        if self._parsers is None:
            raise RequestInvalid("this worker has no parsers for tool calls and reasoning", param="tools")
        return self._parsers.plan(generation.parse, generation, prompt)

    def _answer(
        self, request: RunRequest, plan: ParsePlan | None, run: Run, choice: int, stops: StopStrings | tuple[()]
    ) -> AnswerText:
        generation, prompt = request.generation, request.prompt
        text = TextPipeline(
            self._table,
            prompt_ids=prompt,
            stop=stops,
            include_stop=generation.include_stop,
            skip_special_tokens=generation.skip_special_tokens,
            min_tokens=generation.sampling.min_tokens,
        )
        if plan is None or generation.parse is None:
            return text
        return ParsedAnswer(text, plan.parser(run.id, choice), generation.parse)

    def _expected_cached(self, run: Run, tokens: int, cache: Callable[[], Container[int]] | None) -> int:
        """Return the prompt tokens that the engine should find in its cache. At least one token is always computed."""
        size, envelope = run.envelope.block_size, run.envelope
        if cache is None or not envelope.hashes:
            return 0
        own = self._info.block_size
        return cached_tokens(unpack_u64(envelope.hashes), tokens, block_size=size, cache=cache(), engine_block=own)
