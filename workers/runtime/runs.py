"""Starts, resumes, parks and stops the runs of kind `generate`, until their choices are in an engine.

Emitted tokens are replayed through the pipelines of their choices. Choices that need no engine are ended. The rest go to this
engine, or first to a prefill worker that computes the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import Protocol

import msgspec

from headrace.broker.codec import decode, unpack_u32, unpack_u64
from headrace.broker.errors import RequestOverLimit, WireError
from headrace.broker.jobs import check_limits
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Generation, PrefillDecision
from headrace.broker.protocol.run import Run
from headrace.broker.worker.runs import WorkerRuns
from headrace.workers import metrics
from headrace.workers.detokenize import StopStrings, TextPipeline, TokenTable
from headrace.workers.engine import Capabilities, Engine, EngineInfo, read_matrix
from headrace.workers.errors import AnswerUnreadable, EngineOverloaded, RequestInvalid, UnsupportedByEngine, WorkerError
from headrace.workers.kv.feed import cached_tokens
from headrace.workers.parsing.interface import ParsedAnswer, ParsePlan, ParserSet
from headrace.workers.runtime.choice import (
    INLINE_TOKENS,
    AnswerText,
    ChoiceRun,
    RunRequest,
    replay,
    replay_in_slices,
    tokens_to_replay,
)
from headrace.workers.runtime.decode_side import RemotePrefillRun
from headrace.workers.runtime.outputs import Outputs, check_size
from headrace.workers.runtime.sequences import Sequences

# Ends runs that the engine refuses, and decides which runs cannot be resumed.


def refuse(sink: WorkerRuns, run: Run, error: WorkerError) -> None:
    """End a run with the fault for `error`, or move it to another worker if that may help."""
    if isinstance(error, (RequestInvalid, UnsupportedByEngine)):
        sink.fail(run, JobFault("invalid_request", str(error), param=error.param))
    elif isinstance(error, EngineOverloaded):
        sink.retry_elsewhere(run, JobFault("engine_overloaded", str(error), retriable=True, retry_after_s=1.0))
    elif error.retriable:
        sink.retry_elsewhere(run, JobFault("engine_error", str(error), retriable=True))
    else:
        sink.fail(run, JobFault("engine_error", str(error)))


def cannot_resume(run: Run, generation: Generation, capabilities: Capabilities) -> str | None:
    """Return the reason why a run cannot continue from its emitted tokens, or None if it can or has emitted none.

    An engine continues a request by taking prompt + emitted ids as a forced prefix. State that it keeps beside the tokens is
    lost by that: the position in a grammar, and penalty counts that only cover generated tokens. Such a job ends with a typed
    error instead of silently becoming another answer.
    """
    if not any(log.ids and not log.settled for log in run.choices):
        return None
    if not capabilities.resume:
        return "its worker is gone and this engine cannot continue a partial answer"
    if generation.guided is not None and not capabilities.resume_guided:
        return "its worker is gone and the engine cannot continue structured output in the middle"
    sampling = generation.sampling
    if (sampling.presence_penalty or sampling.frequency_penalty) and not capabilities.resume_penalties:
        return "its worker is gone and the engine cannot carry presence or frequency penalties over"
    if sampling.repetition_penalty != 1 and not capabilities.resume_repetition:
        return "its worker is gone and the engine cannot carry a repetition penalty over"
    return None


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

        The tokens that the choices have already emitted are still to be replayed (`headrace.workers.runtime.choice`).
        Raises WireError and RequestInvalid.
        """
        generation = decode(Generation, payload)
        prompt = unpack_u32(generation.token_ids)
        embeds = None
        if generation.prompt_embeds is not None:
            embeds = read_matrix(generation.prompt_embeds, param="prompt_embeds")
            prompt = [0] * embeds.shape[0]
        tokens = len(prompt)
        room = self._info.context_length - tokens
        if not prompt:
            raise RequestInvalid("the prompt is empty", param="prompt")
        if room < 1:
            raise RequestInvalid(
                f"the prompt has {tokens} tokens; the context length is {self._info.context_length}", param="prompt"
            )
        try:
            check_limits(generation, choices=run.envelope.choices, prompt_tokens=tokens)
        except RequestOverLimit as error:  # of a publisher that has asked no frontend
            raise RequestInvalid(str(error), param=error.param) from None
        plan = None
        if generation.parse is not None:
            if self._parsers is None:
                raise RequestInvalid("this worker has no parsers for tool calls and reasoning", param="tools")
            plan = self._parsers.plan(generation.parse, generation, prompt)
        if plan is not None:
            needed = plan.requirements
            generation = msgspec.structs.replace(
                generation, guided=needed.guided, skip_special_tokens=needed.skip_special_tokens
            )
        wanted = generation.sampling.max_tokens
        limit = room if wanted is None or wanted > room else wanted
        expected = self._expected_cached(run, tokens, cache)
        request = RunRequest(
            generation=generation,
            prompt=prompt,
            limit=limit,
            expected_cached=expected,
            prompt_embeds=embeds,
            requirements=plan.requirements if plan is not None else None,
        )
        stops = StopStrings(generation.stop) if generation.stop and any(generation.stop) else ()
        choices = []
        for index, log in enumerate(run.choices):
            if log.settled:
                continue
            choice = ChoiceRun(run, index, request, self._answer(request, plan, run, index, stops))
            choices.append(choice)
        return generation, choices

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


class RemotePrefills(Protocol):
    """Decides which prompts other workers compute (`headrace.workers.runtime.handover.HandoverCoordinator`)."""

    def decide(self, run: Run, choices: list[ChoiceRun], generation: Generation) -> PrefillDecision: ...

    def remote(self, choices: list[ChoiceRun], decision: PrefillDecision, payload: bytes) -> RemotePrefillRun: ...

    def load(self, report: LoadReport) -> LoadReport:
        """Fill in the hand-over fields of a load report."""


class Runs:
    """The runs of kind `generate`. Without `remotes` every prompt is computed here."""

    def __init__(
        self,
        engine: Engine,
        sink: WorkerRuns,
        intake: ChoiceIntake,
        sequences: Sequences,
        outputs: Outputs,
        remotes: RemotePrefills | None,
    ) -> None:
        self._engine = engine
        self._sink = sink
        self._intake = intake
        self._sequences = sequences
        self._outputs = outputs
        self._remotes = remotes
        self._parked: dict[Run, list[ChoiceRun]] = {}
        self._scope = sequences.scope
        self._replaying: dict[Run, asyncio.Task[None]] = {}  # runs that are not in the engine yet
        self._remote: dict[Run, tuple[RemotePrefillRun, asyncio.Task[None]]] = {}
        self._loop = asyncio.get_running_loop()

    # -- begin -------------------------------------------------------------------------------------------------

    def start(self, run: Run, payload: bytes, *, cache: Callable[[], Container[int]] | None) -> None:
        """Begin, or continue. What is wrong with it is told to the sink."""
        try:
            generation, choices = self._intake.take(run, payload, cache=cache)
            if generation.prompt_logprobs is not None and choices:
                most_bytes = self._sink.max_frame_bytes
                check_size(len(choices[0].prompt), generation.prompt_logprobs, most_bytes=most_bytes)
        except WireError as error:
            self._sink.fail(run, JobFault("invalid_request", f"malformed payload: {error}"))
            return
        except WorkerError as error:
            refuse(self._sink, run, error)
            return
        if run.resumed:
            refusal = cannot_resume(run, generation, self._engine.capabilities)
            if refusal is not None:
                self._sink.fail(run, JobFault("resume_impossible", refusal, retriable=True))
                return
            metrics.RESUMED.inc()
            if tokens_to_replay(choices) > INLINE_TOKENS:
                self._replaying[run] = self._scope.spawn(self._replay(run, choices, generation, payload))
                return
            try:
                replay(choices)
            except AnswerUnreadable as error:
                refuse(self._sink, run, error)
                return
        self._begin_all(run, choices, generation, payload)
        self._sink.flush()

    async def _replay(self, run: Run, choices: list[ChoiceRun], generation: Generation, payload: bytes) -> None:
        """Begin a run once its emitted tokens have been replayed."""
        try:
            await replay_in_slices(choices)
        except AnswerUnreadable as error:
            refuse(self._sink, run, error)
            return
        finally:
            self._replaying.pop(run, None)
        if run in self._parked:  # The run was parked during the replay.
            self._parked[run] = choices
        else:
            self._begin_all(run, choices, generation, payload)
            self._sink.flush()

    def _begin_all(self, run: Run, choices: list[ChoiceRun], generation: Generation, payload: bytes) -> None:
        """Give the unfinished choices to this engine, or first to a prefill worker that computes the prompt."""
        ready = [choice for choice in choices if not self._ended_already(choice)]
        if not ready:
            return
        if self._remotes is not None:
            decision = self._remotes.decide(run, ready, generation)
            metrics.prefills("remote" if decision.remote else "local", decision.reason).inc()
            if decision.reason == "no_prefill_worker" and decision.refuse:
                fault = JobFault("no_prefill_worker", "no prefill worker is ready", retriable=True, retry_after_s=1.0)
                self._sink.fail(run, fault)
                return
            if decision.remote:
                remote = self._remotes.remote(ready, decision, payload)
                task = self._scope.spawn(remote.run())
                self._remote[run] = (remote, task)
                task.add_done_callback(lambda _: self._remote.pop(run, None))
                return
        for choice in ready:
            self._sequences.begin_here(choice)

    def _ended_already(self, choice: ChoiceRun) -> bool:
        emitted = len(choice.run.choices[choice.choice].ids)
        stopped = choice.pipeline.stopped if emitted else None
        if stopped is None and emitted < choice.limit:
            if not choice.started_s:
                choice.started_s = self._loop.time()
            return False
        if choice.generation.prompt_logprobs is not None and choice.prompt_logprobs is None:
            why = "its worker is gone, and the log-probabilities of its prompt with it"
            self._sink.fail(choice.run, JobFault("resume_impossible", why, retriable=True))
            return True
        try:
            self._outputs.finish(choice, [], [], "length" if stopped is None else "stop", stopped)
        except AnswerUnreadable as error:
            self.give_up(choice.run, error)
        return True

    # -- pause and end -----------------------------------------------------------------------------------------

    def park(self, run: Run) -> None:
        if run not in self._parked:
            self._parked[run] = self._withdraw(run)
            metrics.PARKED.inc()

    def unpark(self, run: Run) -> None:
        for choice in self._parked.pop(run, ()):
            if not self._ended_already(choice):
                choice.first_token = None
                self._sequences.begin_here(choice)
        self._sink.flush()

    def resumable(self, run: Run) -> bool:
        able = self._engine.capabilities
        return all(cannot_resume(run, choice.generation, able) is None for choice in self._sequences.of(run))

    def stop(self, run: Run) -> None:
        if run in self._parked:
            del self._parked[run]
        if run in self._replaying:
            self._replaying.pop(run).cancel()
        self._withdraw(run)

    def give_up(self, run: Run, error: WorkerError) -> None:
        """Refuse a run whose answer cannot be read or sent, as it could not be on any other worker."""
        self._withdraw(run)
        refuse(self._sink, run, error)

    def _withdraw(self, run: Run) -> list[ChoiceRun]:
        mine = self._sequences.withdraw(run)
        if run in self._remote:
            remote, task = self._remote.pop(run)
            task.cancel()
            mine += remote.waiting
        return mine
